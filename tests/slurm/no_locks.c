/* Preloaded, it makes a host of its own of a process, as far as locks go: it sees none, as on NFS, where locks on folders
   do not reach other hosts. */

#include <sys/file.h>

int flock(int descriptor, int operation) { return 0; }
