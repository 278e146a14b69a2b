/* Appends a master's records to a slave's log as they are.
 *
 * Who: the writer process, inside a pass, for RAW entries; only the replicator of a slave may submit them. Blocks on:
 * pwrite in sync mode. After a crash: as for any other entry (writer.cdef.h), the entry is in the log completely, or not
 * at all and still in its ring.
 *
 * An entry holds whole records, the first of which belongs at the writer's position. A blank that ends a segment is the
 * last record of its entry and has the bytes after its header, so that the logs of master and slave are equal byte for
 * byte.
 */
