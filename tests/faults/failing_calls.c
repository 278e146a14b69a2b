/* failing_calls.c - LD_PRELOAD shim: one chosen system call on the files below a folder fails, once.
 *
 * For tests only. fail_at(folder, call, n, error) arms it: the n-th such call from now on (from 1) fails with that
 * errno; SHORT instead lets a write take half of its bytes. fail_count() tells how many came. Nothing is armed at first.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHORT (-1)
#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static char root[PATH_MAX], call[32];
static size_t root_length;
static long wanted, count;
static int wanted_error;

void fail_at(const char *folder, const char *name, long n, int error)
{
	snprintf(root, sizeof root, "%s", folder);
	root_length = strlen(root);
	snprintf(call, sizeof call, "%s", name);
	wanted = n;
	wanted_error = error;
	count = 0;
}

long fail_count(void)
{
	return count;
}

static int below_root(const char *path)
{
	return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
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
	return below_root(path);
}

static int own_path(int folder, const char *path)
{
	return path[0] == '/' || folder == AT_FDCWD ? below_root(path) : own(folder);
}

/* The error that this call is to end with, 0 for none. */
static int due(const char *name)
{
	return wanted && !strcmp(name, call) && ++count == wanted ? wanted_error : 0;
}

#define FAILS(name, mine)                        \
	do {                                     \
		int error_ = wanted && !strcmp(name, call) && (mine) ? due(name) : 0; \
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
	int error = wanted && !strcmp(call, "pwrite") && own(fd) ? due("pwrite") : 0;
	if (error > 0) {
		errno = error;
		return -1;
	}
	return REAL(pwrite64)(fd, bytes, error == SHORT && n > 1 ? n / 2 : n, at);
}
ssize_t pwrite(int fd, const void *bytes, size_t n, off_t at) { return pwrite64(fd, bytes, n, at); }

ssize_t write(int fd, const void *bytes, size_t n)
{
	int error = wanted && !strcmp(call, "write") && own(fd) ? due("write") : 0;
	if (error > 0) {
		errno = error;
		return -1;
	}
	return REAL(write)(fd, bytes, error == SHORT && n > 1 ? n / 2 : n);
}

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

int ftruncate64(int fd, off64_t size)
{
	FAILS("ftruncate", own(fd));
	return REAL(ftruncate64)(fd, size);
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

int posix_fallocate64(int fd, off64_t at, off64_t n)
{
	int error = wanted && !strcmp(call, "fallocate") && own(fd) ? due("fallocate") : 0;
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
	int error = wanted && !strcmp(call, "mmap") && fd >= 0 && own(fd) ? due("mmap") : 0;
	if (error) {
		errno = error;
		return MAP_FAILED;
	}
	return REAL(mmap64)(at, n, protection, flags, fd, from);
}
void *mmap(void *at, size_t n, int protection, int flags, int fd, off_t from) { return mmap64(at, n, protection, flags, fd, from); }
