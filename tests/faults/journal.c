/* journal.c - LD_PRELOAD shim that writes down, in one order for all processes, what reaches the store's files.
 *
 * For tests only. PYENGINE_JOURNAL names the journal, PYENGINE_JOURNAL_ROOT the store (a real path),
 * PYENGINE_JOURNAL_ACKS the file into which producers write what was acknowledged. power_cut.py reads the
 * journal and builds the folders that a power cut could have left.
 *
 * One record is one writev() to a file opened with O_APPEND, so records of all processes are in one order.
 * Data writes are written down before they are done and everything else after: a sync that another process
 * begins after a write can then never seem to have missed it (no false alarm; at worst a window of some
 * microseconds is judged too mildly). A sync is two records, and covers the records before the first.
 * Stores through a mapping are no system calls. A file below one of the folders that PYENGINE_JOURNAL_MAPPED names
 * is therefore read before each sync of it, and its pages are written down as writes that the sync covers;
 * mapped_pages.py adds, between syncs, the pages that the kernel might have written back by itself. Both hold
 * the journal's lock meanwhile, so that an older page never follows a newer one.
 *
 * record: u8 kind, u32 bytes of a, u32 bytes of b, u64 inode, u64 number; then a and b
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define WRITE 'W'     /* inode, offset; a = the bytes */
#define SIZE 'S'      /* inode, new size */
#define FRESH 'F'     /* inode of a new, empty file */
#define NAME 'N'      /* inode; a = path that now names it */
#define FOLDER 'M'    /* a = path of a new folder */
#define UNNAME 'U'    /* a = path that is gone */
#define RENAME 'R'    /* inode; a = old path, b = new path */
#define BEGIN 'b'     /* inode, sync number; a = path if it is a folder */
#define END 'e'       /* the same, when the sync has returned 0 */
#define ALL_BEGIN 'y' /* sync number; of everything */
#define ALL_END 'Y'   /* the same, when it has returned 0 */
#define ACK 'A'       /* a = the line */
#define MAPPED 'P'    /* inode that is mapped for writing and shared */

static int journal = -1;
static char root[PATH_MAX], acks[PATH_MAX], mapped[PATH_MAX];
static size_t root_length;
static uint64_t syncs;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void start(void)
{
	const char *path = getenv("PYENGINE_JOURNAL"), *store = getenv("PYENGINE_JOURNAL_ROOT"), *to = getenv("PYENGINE_JOURNAL_ACKS");
	const char *folders = getenv("PYENGINE_JOURNAL_MAPPED");
	if (!path || !store)
		return;
	snprintf(root, sizeof root, "%s", store);
	snprintf(acks, sizeof acks, "%s", to ? to : "");
	snprintf(mapped, sizeof mapped, "%s", folders ? folders : "");
	root_length = strlen(root);
	journal = REAL(open64)(path, O_WRONLY | O_APPEND | O_CLOEXEC);
	syncs = (uint64_t)getpid() << 32;
}

static void put(char kind, uint64_t inode, uint64_t number, const void *a, size_t na, const void *b, size_t nb)
{
	char head[25];
	uint32_t n1 = (uint32_t)na, n2 = (uint32_t)nb;
	struct iovec parts[3] = {{head, sizeof head}, {(void *)a, na}, {(void *)b, nb}};
	int saved = errno;
	head[0] = kind;
	memcpy(head + 1, &n1, 4);
	memcpy(head + 5, &n2, 4);
	memcpy(head + 9, &inode, 8);
	memcpy(head + 17, &number, 8);
	if (REAL(writev)(journal, parts, 3) != (ssize_t)(sizeof head + na + nb))
		abort();
	errno = saved;
}

static int below_root(const char *path)
{
	return journal >= 0 && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* The path behind a descriptor, if it is the store's. */
static int own(int fd, char path[PATH_MAX])
{
	char link[64];
	ssize_t n;
	if (journal < 0 || fd == journal)
		return 0;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	n = readlink(link, path, PATH_MAX - 1);
	if (n < 0)
		return 0;
	path[n] = 0;
	return below_root(path);
}

/* "/proc/self/fd/N/rest", below a folder that a process holds open, by the name that the folder has now; other paths as they are. */
static const char *named(const char *path, char whole[PATH_MAX])
{
	static const char held[] = "/proc/self/fd/";
	char link[64];
	if (strncmp(path, held, sizeof held - 1))
		return path;
	const size_t digits = strspn(path + sizeof held - 1, "0123456789"), length = sizeof held - 1 + digits;
	if (!digits || length >= sizeof link)
		return path;
	snprintf(link, sizeof link, "%.*s", (int)length, path);
	const ssize_t n = readlink(link, whole, PATH_MAX - 1);
	if (n < 0)
		return path;
	snprintf(whole + n, (size_t)(PATH_MAX - n), "%s", path + length);
	return whole;
}

/* An absolute path for (folder, path), if it is the store's. The last part need not exist. */
static int own_path(int folder, const char *path, char whole[PATH_MAX])
{
	char base[PATH_MAX] = "", name[PATH_MAX];
	if (journal < 0)
		return 0;
	path = named(path, name);
	if (path[0] != '/') {
		if (folder == AT_FDCWD) {
			if (!getcwd(base, sizeof base))
				return 0;
		} else if (!own(folder, base))
			return 0;
	}
	return snprintf(whole, PATH_MAX, "%s%s%s", base, base[0] ? "/" : "", path) < PATH_MAX && below_root(whole);
}

static uint64_t inode_of(int fd)
{
	struct stat status;
	return fstat(fd, &status) ? 0 : status.st_ino;
}

static uint64_t inode_at(const char *path)
{
	struct stat status;
	return lstat(path, &status) ? 0 : status.st_ino;
}

static int opened(int fd, int existed, int flags, const char *whole)
{
	if (fd < 0)
		return fd;
	if ((flags & O_TMPFILE) == O_TMPFILE) {
		put(FRESH, inode_of(fd), 0, 0, 0, 0, 0);
	} else if (!existed && (flags & O_CREAT)) {
		put(FRESH, inode_of(fd), 0, 0, 0, 0, 0);
		put(NAME, inode_of(fd), 0, whole, strlen(whole), 0, 0);
	} else if (flags & O_TRUNC) {
		put(SIZE, inode_of(fd), 0, 0, 0, 0, 0);
	}
	return fd;
}

#define OPEN(name, folder_argument, folder)                                            \
	int name(folder_argument const char *path, int flags, ...)                    \
	{                                                                              \
		char whole[PATH_MAX];                                                  \
		mode_t mode = 0;                                                       \
		if (flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) {                  \
			va_list more;                                                  \
			va_start(more, flags);                                         \
			mode = va_arg(more, mode_t);                                   \
			va_end(more);                                                  \
		}                                                                      \
		if (!own_path(folder, path, whole))                                    \
			return REAL(openat64)(folder, path, flags, mode);              \
		int existed = inode_at(whole) != 0;                                    \
		return opened(REAL(openat64)(folder, path, flags, mode), existed, flags, whole); \
	}
#define NONE
OPEN(open, NONE, AT_FDCWD)
OPEN(open64, NONE, AT_FDCWD)
#define FOLDER_ARGUMENT int folder,
OPEN(openat, FOLDER_ARGUMENT, folder)
OPEN(openat64, FOLDER_ARGUMENT, folder)

static void data(int fd, const void *bytes, size_t n, off64_t at)
{
	char path[PATH_MAX];
	if (own(fd, path))
		put(WRITE, inode_of(fd), (uint64_t)at, bytes, n, 0, 0);
}

ssize_t pwrite64(int fd, const void *bytes, size_t n, off64_t at)
{
	data(fd, bytes, n, at);
	return REAL(pwrite64)(fd, bytes, n, at);
}

ssize_t pwrite(int fd, const void *bytes, size_t n, off_t at)
{
	return pwrite64(fd, bytes, n, at);
}

ssize_t write(int fd, const void *bytes, size_t n)
{
	char path[PATH_MAX] = "";
	if (journal >= 0 && fd > 2) {
		if (own(fd, path))
			data(fd, bytes, n, (fcntl(fd, F_GETFL) & O_APPEND) ? lseek64(fd, 0, SEEK_END) : lseek64(fd, 0, SEEK_CUR));
		else if (acks[0] && !strcmp(path, acks))
			put(ACK, 0, 0, bytes, n, 0, 0);
	}
	return REAL(write)(fd, bytes, n);
}

/* Nothing here uses these on the store; the journal has to learn them before anything does. */
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at)
{
	char path[PATH_MAX];
	if (own(fd, path))
		abort();
	return REAL(pwritev)(fd, parts, count, at);
}

ssize_t copy_file_range(int from, off64_t *at_from, int to, off64_t *at_to, size_t n, unsigned flags)
{
	char path[PATH_MAX];
	if (own(to, path))
		abort();
	return REAL(copy_file_range)(from, at_from, to, at_to, n, flags);
}

static int resized(int result, int fd)
{
	char path[PATH_MAX];
	struct stat status;
	if (!result && own(fd, path) && !fstat(fd, &status))
		put(SIZE, status.st_ino, (uint64_t)status.st_size, 0, 0, 0, 0);
	return result;
}

int ftruncate64(int fd, off64_t size) { return resized(REAL(ftruncate64)(fd, size), fd); }
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }
int posix_fallocate64(int fd, off64_t at, off64_t n) { return resized(REAL(posix_fallocate64)(fd, at, n), fd); }
int posix_fallocate(int fd, off_t at, off_t n) { return posix_fallocate64(fd, at, n); }

int fallocate64(int fd, int mode, off64_t at, off64_t n)
{
	int result = REAL(fallocate64)(fd, mode, at, n);
	char path[PATH_MAX];
	struct stat status;
	if (!result && (mode & (FALLOC_FL_PUNCH_HOLE | FALLOC_FL_ZERO_RANGE)) && own(fd, path)) {
		if (fstat(fd, &status) || status.st_size <= at)
			return result;
		n = n < status.st_size - at ? n : status.st_size - at;
		void *zeros = calloc(1, (size_t)n);
		if (!zeros)
			abort();
		put(WRITE, inode_of(fd), (uint64_t)at, zeros, (size_t)n, 0, 0);
		free(zeros);
		return result;
	}
	return resized(result, fd);
}
int fallocate(int fd, int mode, off_t at, off_t n) { return fallocate64(fd, mode, at, n); }

/* Whether the file at `path` lies in a folder of the store whose files are written through mappings. */
static int is_mapped(const char *path)
{
	const char *folder = path + root_length + 1, *end = strchr(folder, '/');
	char name[NAME_MAX + 3];
	if (!mapped[0] || !end || end - folder > NAME_MAX)
		return 0;
	snprintf(name, sizeof name, ":%.*s:", (int)(end - folder), folder);
	return strstr(mapped, name) != NULL;
}

/* Every page of the file that is not zero, as a write. */
static void put_pages(const char *path, uint64_t inode)
{
	static const char zeros[4096];
	char page[4096];
	off64_t at = 0;
	ssize_t n;
	int fd = REAL(open64)(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return;
	while ((n = pread64(fd, page, sizeof page, at)) > 0) {
		if (memcmp(page, zeros, (size_t)n))
			put(WRITE, inode, (uint64_t)at, page, (size_t)n, 0, 0);
		at += n;
	}
	REAL(close)(fd);
}

static int sync_with(int (*real)(int), int fd)
{
	char path[PATH_MAX];
	struct stat status;
	int result;
	uint64_t number;
	size_t n;
	if (!own(fd, path) || fstat(fd, &status))
		return real(fd);
	number = __atomic_add_fetch(&syncs, 1, __ATOMIC_RELAXED);
	n = S_ISDIR(status.st_mode) ? strlen(path) : 0;
	if (!n && is_mapped(path)) {
		flock(journal, LOCK_EX);
		put_pages(path, status.st_ino);
		put(BEGIN, status.st_ino, number, path, n, 0, 0);
		flock(journal, LOCK_UN);
	} else {
		put(BEGIN, status.st_ino, number, path, n, 0, 0);
	}
	result = real(fd);
	if (!result)
		put(END, status.st_ino, number, path, n, 0, 0);
	return result;
}

int fsync(int fd) { return sync_with(REAL(fsync), fd); }
int fdatasync(int fd) { return sync_with(REAL(fdatasync), fd); }

int syncfs(int fd)
{
	char path[PATH_MAX];
	const int is_own = own(fd, path);
	const uint64_t number = __atomic_add_fetch(&syncs, 1, __ATOMIC_RELAXED);
	if (is_own)
		put(ALL_BEGIN, 0, number, 0, 0, 0, 0);
	const int result = REAL(syncfs)(fd);
	if (is_own && !result)
		put(ALL_END, 0, number, 0, 0, 0, 0);
	return result;
}

int linkat(int from, const char *old, int to, const char *path, int flags)
{
	char whole[PATH_MAX];
	int result = REAL(linkat)(from, old, to, path, flags);
	if (!result && own_path(to, path, whole))
		put(NAME, inode_at(whole), 0, whole, strlen(whole), 0, 0);
	return result;
}
int link(const char *old, const char *path) { return linkat(AT_FDCWD, old, AT_FDCWD, path, 0); }

int renameat2(int from, const char *old, int to, const char *path, unsigned flags)
{
	char before[PATH_MAX], after[PATH_MAX];
	int result = REAL(renameat2)(from, old, to, path, flags);
	if (!result && own_path(from, old, before) && own_path(to, path, after))
		put(RENAME, inode_at(after), 0, before, strlen(before), after, strlen(after));
	return result;
}
int renameat(int from, const char *old, int to, const char *path) { return renameat2(from, old, to, path, 0); }
int rename(const char *old, const char *path) { return renameat2(AT_FDCWD, old, AT_FDCWD, path, 0); }

int mkdirat(int folder, const char *path, mode_t mode)
{
	char whole[PATH_MAX];
	int result = REAL(mkdirat)(folder, path, mode);
	if (!result && own_path(folder, path, whole))
		put(FOLDER, 0, 0, whole, strlen(whole), 0, 0);
	return result;
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int folder, const char *path, int flags)
{
	char whole[PATH_MAX];
	int mine = own_path(folder, path, whole);
	int result = REAL(unlinkat)(folder, path, flags);
	if (!result && mine)
		put(UNNAME, 0, 0, whole, strlen(whole), 0, 0);
	return result;
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

void *mmap64(void *at, size_t n, int protection, int flags, int fd, off64_t from)
{
	char path[PATH_MAX];
	if (fd >= 0 && (flags & 3) == MAP_SHARED && (protection & PROT_WRITE) && own(fd, path))
		put(MAPPED, inode_of(fd), 0, path, strlen(path), 0, 0);
	return REAL(mmap64)(at, n, protection, flags, fd, from);
}
void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t from)
{
    return mmap64(at, n, protection, flags, fd, from);
}
