/* Preloaded, it makes a host of its own of a process, as far as locks on folders go: it sees none, and shows none. So it
   is on NFS, where these do not reach other hosts. Dask's locks, on files, are of one host each. */

#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

int flock(int descriptor, int operation) {
    struct stat status;
    if (fstat(descriptor, &status) == 0 && S_ISDIR(status.st_mode)) return 0;
    return syscall(SYS_flock, descriptor, operation);
}
