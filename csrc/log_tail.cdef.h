/* The end of the log that the writer's pass is writing: where the next record goes, rolling to
 * the next segment, and where the pass is written (sync mode, disks that copy on write, large passes of
 * async mode) the bytes gathered for one pwrite.
 *
 * Who: the writer process, inside a pass. Blocks on: that pwrite. After a crash:
 * `intent_end` is stored before the bytes, so everything that may have been touched lies below it.
 */
