/* Takes one entry from a producer's ring: checks it, appends its records to the log, and answers it.
 *
 * Who: the writer process, inside a pass (writer.cdef.h, steps 2 and 3). Blocks on: pwrite of the bytes
 * for which the stage has no room. After a crash: nothing of the entry counts before the pass is committed; the next
 * writer restores the queue's offset from the undo list and takes the entry again.
 *
 * The producer may change its ring at any time, so what decides is copied once, to private memory, and checked there; bodies
 * are copied from the ring into the record, with the CRC of the copy.
 */
