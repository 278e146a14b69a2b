/* logged_disk.c - a disk that writes down what reaches it: a FUSE server of one folder with `disk`, `acks` and `fail`.
 *
 *     logged_disk IMAGE JOURNAL FOLDER FLUSH_US
 *
 * For tests only, as root: logged_disk.py runs it below a loop device. It mounts itself on FOLDER, says `ready` on its
 * output and serves until FOLDER is unmounted or its parent ends. `disk` is IMAGE, which it changes; `acks` is what
 * producers appended to it, so that acknowledgements and writes are in one order, in JOURNAL, in journal.c's records:
 *
 *     F inode 1                    the disk, at the beginning
 *     W inode 1, offset; bytes     a write that reached the disk: in its cache from then on
 *     b, e inode 1, flush number   a flush has begun, has ended: it covers the writes before its b
 *     A; text                      appended to `acks`
 *
 * What is written to `fail` is a text: each write to the disk that holds it fails with EIO and changes nothing, until
 * another text is there. A file's data can be told from the file system's own blocks in this way.
 *
 * A write is written down before it is answered, an e before the flush is, an A before the append returns.
 * Each of THREADS blocks in read(/dev/fuse); a flush sleeps FLUSH_US without the lock, as a disk would, so that
 * writes and acknowledgements go on under it. A request that it does not know gets ENOSYS. If it dies the loop
 * device has errors and the mount stays, dead, until it is unmounted; the journal holds whole records, maybe
 * but the last. It speaks <linux/fuse.h> itself: nothing has to be installed for it.
 */
#define _GNU_SOURCE
#include <err.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define THREADS 4
#define WRITE_BYTES_MAX (128 << 10)
#define REQUEST_BYTES (WRITE_BYTES_MAX + 4096)
#define DISK 2
#define ACKS 3
#define FAIL 4
#define TEXT_BYTES_MAX 32768

static int device, journal;
static uint8_t *image;
static uint64_t image_bytes, flushes;
static char *acks;
static size_t acks_bytes, acks_room;
static char fail_on[TEXT_BYTES_MAX];
static size_t fail_on_bytes;
static useconds_t flush_us;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* image, acks, fail_on, journal */

static void note(char kind, uint64_t number, const void *bytes, uint32_t count)
{
	struct {
		char kind;
		uint32_t a_bytes, b_bytes;
		uint64_t inode, number;
	} __attribute__((packed)) head = {kind, count, 0, kind == 'A' ? 0 : 1, number};
	struct iovec parts[2] = {{&head, sizeof head}, {(void *)bytes, count}};
	if (writev(journal, parts, 2) != (ssize_t)(sizeof head + count))
		err(1, "the journal cannot be written");
}

/* The answer to a request: an error number, or `count` bytes. */
static void answer(uint64_t unique, int error, const void *bytes, size_t count)
{
	struct fuse_out_header head = {sizeof head + (error ? 0 : count), -error, unique};
	struct iovec parts[2] = {{&head, sizeof head}, {(void *)bytes, error ? 0 : count}};
	if (writev(device, parts, 2) < 0 && errno != ENOENT && errno != ENODEV) /* those: no process waits for it any more */
		err(1, "a request cannot be answered");
}

static void describe(uint64_t node, struct fuse_attr *attr)
{
	memset(attr, 0, sizeof *attr);
	attr->ino = node;
	attr->mode = node == FUSE_ROOT_ID ? S_IFDIR | 0700 : S_IFREG | 0600;
	attr->nlink = node == FUSE_ROOT_ID ? 2 : 1;
	attr->blksize = 4096;
	attr->size = node == DISK ? image_bytes : 0;
	attr->blocks = attr->size / 512;
}

static void start(uint64_t unique, const struct fuse_init_in *in)
{
	struct fuse_init_out out = {
		.major = FUSE_KERNEL_VERSION,
		.minor = in->minor < FUSE_KERNEL_MINOR_VERSION ? in->minor : FUSE_KERNEL_MINOR_VERSION,
		.max_readahead = in->max_readahead, .flags = in->flags & (FUSE_ASYNC_READ | FUSE_BIG_WRITES),
		.max_background = 16, .congestion_threshold = 12, .max_write = WRITE_BYTES_MAX, .time_gran = 1,
	};
	if (in->major != FUSE_KERNEL_VERSION || in->minor < 23)
		errx(1, "the kernel speaks FUSE %u.%u", in->major, in->minor);
	answer(unique, 0, &out, sizeof out);
}

static void look_up(uint64_t unique, const char *name)
{
	struct fuse_entry_out out = {.attr_valid = 3600, .entry_valid = 3600};
	out.nodeid = !strcmp(name, "disk") ? DISK : !strcmp(name, "acks") ? ACKS : !strcmp(name, "fail") ? FAIL : 0;
	if (!out.nodeid) {
		answer(unique, ENOENT, NULL, 0);
		return;
	}
	describe(out.nodeid, &out.attr);
	answer(unique, 0, &out, sizeof out);
}

static void get_attributes(uint64_t unique, uint64_t node)
{
	struct fuse_attr_out out = {.attr_valid = 3600};
	describe(node, &out.attr);
	answer(unique, 0, &out, sizeof out);
}

static void open_file(uint64_t unique, uint64_t node)
{
	struct fuse_open_out out = {.open_flags = node == DISK ? FOPEN_KEEP_CACHE : FOPEN_DIRECT_IO};
	answer(unique, 0, &out, sizeof out);
}

static void read_file(uint64_t unique, uint64_t node, const struct fuse_read_in *in)
{
	static _Thread_local uint8_t bytes[WRITE_BYTES_MAX];
	uint64_t end, count = 0;
	pthread_mutex_lock(&lock);
	end = node == DISK ? image_bytes : node == ACKS ? acks_bytes : 0;
	if (in->offset < end) {
		count = end - in->offset < in->size ? end - in->offset : in->size;
		count = count < sizeof bytes ? count : sizeof bytes;
		memcpy(bytes, (node == DISK ? image : (uint8_t *)acks) + in->offset, count);
	}
	pthread_mutex_unlock(&lock);
	answer(unique, 0, bytes, count);
}

static void write_file(uint64_t unique, uint64_t node, const struct fuse_write_in *in, const uint8_t *bytes)
{
	struct fuse_write_out out = {.size = in->size};
	int error = 0;
	if (node == DISK && (in->offset > image_bytes || in->size > image_bytes - in->offset)) {
		answer(unique, ENOSPC, NULL, 0);
		return;
	}
	pthread_mutex_lock(&lock);
	if (node == FAIL) {
		fail_on_bytes = in->size < sizeof fail_on ? in->size : sizeof fail_on;
		memcpy(fail_on, bytes, fail_on_bytes);
	} else if (node == DISK && fail_on_bytes && memmem(bytes, in->size, fail_on, fail_on_bytes)) {
		error = EIO;
	} else if (node == DISK) {
		memcpy(image + in->offset, bytes, in->size);
		note('W', in->offset, bytes, in->size);
	} else {
		while (acks_room - acks_bytes < in->size)
			if (!(acks = realloc(acks, acks_room = acks_room ? 2 * acks_room : 1 << 20)))
				err(1, "no memory for what was acknowledged");
		memcpy(acks + acks_bytes, bytes, in->size);
		acks_bytes += in->size;
		note('A', 0, bytes, in->size);
	}
	pthread_mutex_unlock(&lock);
	answer(unique, error, &out, sizeof out);
}

static void flush(uint64_t unique, uint64_t node)
{
	uint64_t number;
	if (node == DISK) {
		pthread_mutex_lock(&lock);
		number = ++flushes;
		note('b', number, NULL, 0);
		pthread_mutex_unlock(&lock);
		usleep(flush_us);
		pthread_mutex_lock(&lock);
		note('e', number, NULL, 0);
		pthread_mutex_unlock(&lock);
	}
	answer(unique, 0, NULL, 0);
}

static void serve_one(const struct fuse_in_header *head)
{
	const void *argument = head + 1;
	struct fuse_statfs_out room = {.st = {.bsize = 4096, .frsize = 4096, .namelen = 255}};
	switch (head->opcode) {
	case FUSE_INIT: start(head->unique, argument); break;
	case FUSE_LOOKUP: look_up(head->unique, argument); break;
	case FUSE_GETATTR: get_attributes(head->unique, head->nodeid); break;
	case FUSE_OPEN: open_file(head->unique, head->nodeid); break;
	case FUSE_READ: read_file(head->unique, head->nodeid, argument); break;
	case FUSE_WRITE:
		write_file(head->unique, head->nodeid, argument, (const uint8_t *)argument + sizeof(struct fuse_write_in));
		break;
	case FUSE_FSYNC: flush(head->unique, head->nodeid); break;
	case FUSE_STATFS: answer(head->unique, 0, &room, sizeof room); break;
	case FUSE_RELEASE:
	case FUSE_DESTROY: answer(head->unique, 0, NULL, 0); break;
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
	case FUSE_INTERRUPT: break; /* these want no answer */
	default: answer(head->unique, ENOSYS, NULL, 0);
	}
}

static void *serve(void *unused)
{
	uint8_t *request = malloc(REQUEST_BYTES);
	if (!request)
		err(1, "no memory");
	for (;;) {
		ssize_t count = read(device, request, REQUEST_BYTES);
		if (count >= (ssize_t)sizeof(struct fuse_in_header))
			serve_one((const struct fuse_in_header *)request);
		else if (errno == ENODEV) /* unmounted */
			exit(0);
		else if (errno != EINTR && errno != EAGAIN && errno != ENOENT)
			err(1, "no request can be read");
	}
	return unused;
}

int main(int count, char **words)
{
	char options[128];
	struct stat status;
	pthread_t thread;
	int file;
	if (count != 5)
		errx(2, "usage: logged_disk IMAGE JOURNAL FOLDER FLUSH_US");
	if (prctl(PR_SET_PDEATHSIG, SIGKILL) || signal(SIGINT, SIG_IGN) == SIG_ERR)
		err(1, "signals");
	file = open(words[1], O_RDWR | O_CLOEXEC);
	journal = open(words[2], O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
	device = open("/dev/fuse", O_RDWR | O_CLOEXEC);
	if (file < 0 || journal < 0 || device < 0 || fstat(file, &status))
		err(1, "%s", file < 0 ? words[1] : journal < 0 ? words[2] : "/dev/fuse");
	image_bytes = (uint64_t)status.st_size;
	image = mmap(NULL, image_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	if (image == MAP_FAILED)
		err(1, "%s", words[1]);
	flush_us = (useconds_t)atol(words[4]);
	note('F', 0, NULL, 0);
	snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=%u,group_id=%u", device, getuid(), getgid());
	if (mount("logged_disk", words[3], "fuse", MS_NOSUID | MS_NODEV, options))
		err(1, "mounting %s", words[3]);
	for (int i = 1; i < THREADS; i++)
		if ((errno = pthread_create(&thread, NULL, serve, NULL)))
			err(1, "no thread");
	puts("ready");
	fflush(stdout);
	serve(NULL);
}
