/* failing_calls.c - LD_PRELOAD shim: chosen system calls on the files below some folders, and on TCP sockets, fail.
 *
 * For tests only; fstatfs can be made to name another file system, too. Nothing is armed at first; SHORT as errno lets a write take half of its bytes. Two ways to arm it:
 * In the process itself, fail_at(folder, call, n, error): the n-th such call from now on (from 1) fails, once;
 * fail_count() tells how many came. From outside, while it runs: the file that PYENGINE_FAILING_PLAN names holds a
 * struct plan (failing_engine.py writes it), folders are those of PYENGINE_FAILING_FOLDERS, parted by colons. Each
 * process looks there whether it is meant (`kind`: X of `-m pyengine.workers.X`) and counts in it.
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
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/vfs.h>
#include <unistd.h>

#define SHORT (-1)
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

struct plan {
	char kind[32];
	char call[32];
	int64_t first; /* the first call to fail, from 1; 0: nothing is armed */
	int64_t last;
	int64_t came;
	int64_t failed;
	int32_t error;
};

static char folders[2 * PATH_MAX], kind[32];
static struct plan own_plan, *plan = &own_plan;

__attribute__((constructor)) static void find_plan(void)
{
	const char *path = getenv("PYENGINE_FAILING_PLAN"), *below = getenv("PYENGINE_FAILING_FOLDERS");
	char line[4096] = {0};
	int fd = path ? REAL(openat64)(AT_FDCWD, path, O_RDWR | O_CLOEXEC) : -1;
	snprintf(folders, sizeof folders, "%s", below ? below : "");
	if (fd < 0 || !below)
		return;
	struct plan *shared = REAL(mmap64)(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	fd = REAL(openat64)(AT_FDCWD, "/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
	const ssize_t n = read(fd, line, sizeof line - 1);
	close(fd);
	for (char *word = line; word < line + n; word += strlen(word) + 1)
		if (!strncmp(word, "pyengine.workers.", 17))
			snprintf(kind, sizeof kind, "%s", word + 17);
	if (shared != MAP_FAILED)
		plan = shared;
}

void fail_at(const char *folder, const char *name, long n, int error)
{
	snprintf(folders, sizeof folders, "%s", folder);
	memset(plan, 0, sizeof *plan);
	snprintf(plan->call, sizeof plan->call, "%s", name);
	plan->error = error;
	plan->first = plan->last = n;
}

long fail_count(void)
{
	return plan->came;
}

static int below(const char *path)
{
	for (const char *folder = folders; *folder; folder += *folder == ':') {
		const size_t length = strcspn(folder, ":");
		if (!strncmp(path, folder, length) && (path[length] == '/' || !path[length]))
			return 1;
		folder += length;
	}
	return 0;
}

static int own(int fd)
{
	char link[64], path[PATH_MAX];
	ssize_t n;
	snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
	n = readlink(link, path, sizeof path - 1);
	if (n < 0)
		return 0;
	path[n] = 0;
	return below(path);
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

static int own_path(int folder, const char *path)
{
	char whole[PATH_MAX];
	path = named(path, whole);
	return path[0] == '/' || folder == AT_FDCWD ? below(path) : own(folder);
}

static int armed(const char *name)
{
	return __atomic_load_n(&plan->first, __ATOMIC_ACQUIRE) && !strcmp(name, plan->call) && !strcmp(plan->kind, kind);
}

/* The error that this call is to end with, 0 for none. */
static int due(void)
{
	const int64_t n = __atomic_add_fetch(&plan->came, 1, __ATOMIC_RELAXED);
	if (n < plan->first || n > plan->last)
		return 0;
	__atomic_add_fetch(&plan->failed, 1, __ATOMIC_RELAXED);
	return plan->error;
}

#define FAILS(name, mine)                        \
	do {                                     \
		int error_ = armed(name) && (mine) ? due() : 0; \
		if (error_) {                    \
			errno = error_;          \
			return -1;               \
		}                                \
	} while (0)

#define OPEN(name, folder_argument, folder)                                            \
	int name(folder_argument const char *path, int flags, ...)                    \
	{                                                                              \
		mode_t mode = 0;                                                       \
		if (flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) {                  \
			va_list more;                                                  \
			va_start(more, flags);                                         \
			mode = va_arg(more, mode_t);                                   \
			va_end(more);                                                  \
		}                                                                      \
		FAILS("open", own_path(folder, path));                                 \
		return REAL(openat64)(folder, path, flags, mode);                      \
	}
#define NONE
OPEN(open, NONE, AT_FDCWD)
OPEN(open64, NONE, AT_FDCWD)
#define FOLDER_ARGUMENT int folder,
OPEN(openat, FOLDER_ARGUMENT, folder)
OPEN(openat64, FOLDER_ARGUMENT, folder)

ssize_t pwrite64(int fd, const void *bytes, size_t n, off64_t at)
{
	int error = armed("pwrite") && own(fd) ? due() : 0;
	if (error > 0) {
		errno = error;
		return -1;
	}
	return REAL(pwrite64)(fd, bytes, error == SHORT && n > 1 ? n / 2 : n, at);
}
ssize_t pwrite(int fd, const void *bytes, size_t n, off_t at) { return pwrite64(fd, bytes, n, at); }

ssize_t write(int fd, const void *bytes, size_t n)
{
	int error = armed("write") && own(fd) ? due() : 0;
	if (error > 0) {
		errno = error;
		return -1;
	}
	return REAL(write)(fd, bytes, error == SHORT && n > 1 ? n / 2 : n);
}

ssize_t preadv64v2(int fd, const struct iovec *pieces, int count, off64_t at, int flags)
{
	FAILS("pread", own(fd));
	return REAL(preadv64v2)(fd, pieces, count, at, flags);
}

/* A socket to another host, as far as one can tell: no file has it. */
static int tcp(int fd)
{
	struct sockaddr_storage name;
	socklen_t length = sizeof name;
	return !getsockname(fd, (struct sockaddr *)&name, &length) && (name.ss_family == AF_INET || name.ss_family == AF_INET6);
}

int connect(int fd, const struct sockaddr *to, socklen_t length)
{
	FAILS("connect", tcp(fd));
	return REAL(connect)(fd, to, length);
}

int accept4(int fd, struct sockaddr *from, socklen_t *length, int flags)
{
	FAILS("accept", tcp(fd));
	return REAL(accept4)(fd, from, length, flags);
}

ssize_t send(int fd, const void *bytes, size_t n, int flags)
{
	int error = armed("send") && tcp(fd) ? due() : 0;
	if (error > 0) {
		errno = error;
		return -1;
	}
	return REAL(send)(fd, bytes, error == SHORT && n > 1 ? n / 2 : n, flags);
}

ssize_t recv(int fd, void *bytes, size_t n, int flags)
{
	int error = armed("recv") && tcp(fd) ? due() : 0;
	if (error > 0) {
		errno = error;
		return -1;
	}
	return REAL(recv)(fd, bytes, error == SHORT && n > 1 ? n / 2 : n, flags);
}

/* PYENGINE_FAKED_FILE_SYSTEM: the magic number that files below those folders have, for all processes. */
static int faked(int failed, struct statfs *found, int fd)
{
	const char *magic = getenv("PYENGINE_FAKED_FILE_SYSTEM");
	if (!failed && magic && own(fd))
		found->f_type = strtol(magic, NULL, 0);
	return failed;
}
int fstatfs64(int fd, struct statfs64 *found) { return faked(REAL(fstatfs64)(fd, found), (struct statfs *)found, fd); }
int fstatfs(int fd, struct statfs *found) { return faked(REAL(fstatfs)(fd, found), found, fd); }

int fsync(int fd)
{
	FAILS("fsync", own(fd));
	return REAL(fsync)(fd);
}

int fdatasync(int fd)
{
	FAILS("fsync", own(fd));
	return REAL(fdatasync)(fd);
}

int syncfs(int fd)
{
	FAILS("fsync", own(fd));
	return REAL(syncfs)(fd);
}

int ftruncate64(int fd, off64_t size)
{
	FAILS("ftruncate", own(fd));
	return REAL(ftruncate64)(fd, size);
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int posix_fallocate64(int fd, off64_t at, off64_t n)
{
	int error = armed("fallocate") && own(fd) ? due() : 0;
	return error ? error : REAL(posix_fallocate64)(fd, at, n);
}
int posix_fallocate(int fd, off_t at, off_t n) { return posix_fallocate64(fd, at, n); }

int fallocate64(int fd, int mode, off64_t at, off64_t n)
{
	FAILS("fallocate", own(fd));
	return REAL(fallocate64)(fd, mode, at, n);
}
int fallocate(int fd, int mode, off_t at, off_t n) { return fallocate64(fd, mode, at, n); }

int linkat(int from, const char *old, int to, const char *path, int flags)
{
	FAILS("link", own_path(to, path));
	return REAL(linkat)(from, old, to, path, flags);
}
int link(const char *old, const char *path) { return linkat(AT_FDCWD, old, AT_FDCWD, path, 0); }

int renameat(int from, const char *old, int to, const char *path)
{
	FAILS("rename", own_path(to, path));
	return REAL(renameat)(from, old, to, path);
}
int rename(const char *old, const char *path) { return renameat(AT_FDCWD, old, AT_FDCWD, path); }

int mkdirat(int folder, const char *path, mode_t mode)
{
	FAILS("mkdir", own_path(folder, path));
	return REAL(mkdirat)(folder, path, mode);
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int folder, const char *path, int flags)
{
	FAILS("unlink", own_path(folder, path));
	return REAL(unlinkat)(folder, path, flags);
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

void *mmap64(void *at, size_t n, int protection, int flags, int fd, off64_t from)
{
	int error = armed("mmap") && fd >= 0 && own(fd) ? due() : 0;
	if (error) {
		errno = error;
		return MAP_FAILED;
	}
	return REAL(mmap64)(at, n, protection, flags, fd, from);
}
void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t from) { return mmap64(at, n, protection, flags, fd, from); }

/* No file tells whose memory it is: every one of the process counts. */
int mlock(const void *at, size_t n)
{
	FAILS("mlock", 1);
	return REAL(mlock)(at, n);
}
