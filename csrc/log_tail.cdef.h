/* The end of the log, to which the writer's pass appends: it rolls to the next segment, and gathers the bytes of a pass
 * for one pwrite (in sync mode, on copy-on-write disks, and for large passes of async mode).
 *
 * Who: the writer process, inside a pass. Blocks on: that pwrite. After a crash: `intent_end` is stored before the bytes,
 * so all changed bytes are below it.
 */
