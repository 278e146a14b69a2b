package rivals;

/** A log in a folder. */
interface Log extends AutoCloseable {
    /** A producer for one thread. */
    Producer producer(int number) throws Exception;

    /** Puts bodies one after the other. */
    interface Producer {
        /** Returns when the log has the body, as far as it promises by default. */
        void put(byte[] body) throws Exception;

        /** Returns when all that was put is in the log's files, as far as the page cache. */
        default void end() throws Exception {
        }
    }
}
