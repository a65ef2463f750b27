/* A driver of CUDA's with one H100 whose memory is the host's and whose kernels do nothing.

   On LD_LIBRARY_PATH as libcuda.so.1, it lets a whole command run as on a GPU, to see what is compiled and loaded for
   it, and how long that takes. What kernels should have written is zero, so products of zeros come out right. Functions
   that it lacks return CUDA_ERROR_NOT_SUPPORTED; with PRETENDED_LOG set, stderr has their names. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;
typedef uint64_t Address;
typedef void *Handle;

enum { SUCCESS = 0, INVALID_DEVICE = 101, NOT_SUPPORTED = 801 };
enum { VERSION = 13050, MEMORY_NBYTES = 1 << 30, PAGE = 4096 };

static char context[64];
static _Thread_local Handle current;

/* A handle of its own for everything that is made, as those who count them expect. */
static Handle made_anew(void)
{
    static _Atomic intptr_t last = 1 << 20;
    return (Handle)(last += 64);
}

Result cuInit(unsigned flags) { return SUCCESS; }
Result cuDriverGetVersion(int *version) { *version = VERSION; return SUCCESS; }
Result cuDeviceGetCount(int *count) { *count = 1; return SUCCESS; }
Result cuDeviceGet(int *device, int number) { *device = number; return number ? INVALID_DEVICE : SUCCESS; }
Result cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Pretended"); return SUCCESS; }
Result cuDeviceGetUuid_v2(void *uuid, int device) { memset(uuid, 7, 16); return SUCCESS; }
Result cuDeviceTotalMem_v2(size_t *nbytes, int device) { *nbytes = MEMORY_NBYTES; return SUCCESS; }
Result cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return SUCCESS; }
Result cuDeviceGetPCIBusId(char *name, int length, int device)
{
    snprintf(name, length, "0000:00:00.0");
    return SUCCESS;
}

Result cuDeviceGetAttribute(int *value, int attribute, int device)
{
    switch (attribute) {
    case 1: *value = 1024; break;                            /* threads of a block */
    case 2: case 3: *value = 1024; break;                    /* along its sides */
    case 4: *value = 64; break;
    case 5: *value = 0x7fffffff; break;                      /* blocks of a grid */
    case 6: case 7: *value = 65535; break;
    case 8: *value = 49152; break;                           /* shared memory of a block */
    case 10: *value = 32; break;                             /* a warp */
    case 12: *value = 65536; break;                          /* registers */
    case 16: *value = 132; break;                            /* multiprocessors */
    case 39: *value = 2048; break;                           /* threads of a multiprocessor */
    case 41: *value = 1; break;                              /* unified addresses */
    case 75: *value = 9; break;                              /* the compute capability */
    case 76: *value = 0; break;
    case 97: *value = 232448; break;                         /* shared memory that a block may opt in to */
    default: *value = 0;
    }
    return SUCCESS;
}

Result cuDevicePrimaryCtxRetain(Handle *made, int device) { *made = context; return SUCCESS; }
Result cuDevicePrimaryCtxRelease_v2(int device) { return SUCCESS; }
Result cuDevicePrimaryCtxReset_v2(int device) { return SUCCESS; }
Result cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { *flags = 0; *active = 1; return SUCCESS; }
Result cuCtxGetCurrent(Handle *found) { *found = current; return SUCCESS; }
Result cuCtxSetCurrent(Handle wanted) { current = wanted; return SUCCESS; }
Result cuCtxPushCurrent_v2(Handle wanted) { current = wanted; return SUCCESS; }
Result cuCtxPopCurrent_v2(Handle *found) { *found = current; current = NULL; return SUCCESS; }
Result cuCtxGetDevice(int *device) { *device = 0; return SUCCESS; }
Result cuCtxSynchronize(void) { return SUCCESS; }
Result cuCtxGetStreamPriorityRange(int *least, int *most) { *least = 0; *most = -5; return SUCCESS; }

Result cuMemGetInfo_v2(size_t *unused, size_t *all) { *unused = *all = MEMORY_NBYTES; return SUCCESS; }
static Result allocated(Address *place, size_t nbytes)
{
    *place = (Address)aligned_alloc(PAGE, (nbytes + PAGE - 1) / PAGE * PAGE);
    memset((void *)*place, 0, nbytes);
    return SUCCESS;
}
Result cuMemAlloc_v2(Address *place, size_t nbytes) { return allocated(place, nbytes); }
Result cuMemFree_v2(Address place) { free((void *)place); return SUCCESS; }
Result cuMemHostAlloc(Address *place, size_t nbytes, unsigned flags) { return allocated(place, nbytes); }
Result cuMemFreeHost(void *place) { free(place); return SUCCESS; }
Result cuMemHostRegister_v2(void *place, size_t nbytes, unsigned flags) { return SUCCESS; }
Result cuMemHostUnregister(void *place) { return SUCCESS; }
Result cuMemHostGetDevicePointer_v2(Address *place, void *host, unsigned flags)
{
    *place = (Address)host;
    return SUCCESS;
}
Result cuPointerGetAttribute(void *value, int attribute, Address place)
{
    if (attribute == 9 || attribute == 5)                    /* which GPU's; whose name is on this copy */
        return *(int *)value = 0, SUCCESS;
    return *(Address *)value = place, SUCCESS;
}

static Result copied(Address target, Address source, size_t nbytes)
{
    return memmove((void *)target, (void *)source, nbytes), SUCCESS;
}
Result cuMemcpyHtoD_v2(Address target, void *source, size_t nbytes) { return copied(target, (Address)source, nbytes); }
Result cuMemcpyDtoH_v2(void *target, Address source, size_t nbytes) { return copied((Address)target, source, nbytes); }
Result cuMemcpyDtoD_v2(Address target, Address source, size_t nbytes) { return copied(target, source, nbytes); }
Result cuMemcpyHtoDAsync_v2(Address target, void *source, size_t nbytes, Handle stream)
{
    return copied(target, (Address)source, nbytes);
}
Result cuMemcpyDtoHAsync_v2(void *target, Address source, size_t nbytes, Handle stream)
{
    return copied((Address)target, source, nbytes);
}
Result cuMemcpyDtoDAsync_v2(Address target, Address source, size_t nbytes, Handle stream)
{
    return copied(target, source, nbytes);
}

/* CUDA_MEMCPY2D: x, y, kind, host, device, array, pitch of the source, then of the target; width in bytes, height. */
Result cuMemcpy2DAsync_v2(const uint64_t *told, Handle stream)
{
    const uint64_t source = (uint32_t)told[2] == 1 ? told[3] : told[4];
    const uint64_t target = (uint32_t)told[9] == 1 ? told[10] : told[11];
    const uint64_t from = told[6] ? told[6] : told[14], to = told[13] ? told[13] : told[14];
    for (uint64_t row = 0; row < told[15]; row++)
        copied(target + (told[8] + row) * to + told[7], source + (told[1] + row) * from + told[0], told[14]);
    return SUCCESS;
}
Result cuMemsetD8_v2(Address target, unsigned char value, size_t nbytes)
{
    memset((void *)target, value, nbytes);
    return SUCCESS;
}
Result cuMemsetD8Async(Address target, unsigned char value, size_t nbytes, Handle stream)
{
    return cuMemsetD8_v2(target, value, nbytes);
}

Result cuStreamCreate(Handle *made, unsigned flags) { *made = made_anew(); return SUCCESS; }
Result cuStreamCreateWithPriority(Handle *made, unsigned flags, int priority) { *made = made_anew(); return SUCCESS; }
Result cuStreamDestroy_v2(Handle stream) { return SUCCESS; }
Result cuStreamSynchronize(Handle stream) { return SUCCESS; }
Result cuStreamQuery(Handle stream) { return SUCCESS; }
Result cuStreamWaitEvent(Handle stream, Handle event, unsigned flags) { return SUCCESS; }
Result cuEventCreate(Handle *made, unsigned flags) { *made = made_anew(); return SUCCESS; }
Result cuEventDestroy_v2(Handle event) { return SUCCESS; }
Result cuEventRecord(Handle event, Handle stream) { return SUCCESS; }
Result cuEventSynchronize(Handle event) { return SUCCESS; }
Result cuEventQuery(Handle event) { return SUCCESS; }
Result cuEventElapsedTime_v2(float *milliseconds, Handle begun, Handle ended) { *milliseconds = 1; return SUCCESS; }

Result cuLibraryLoadData(Handle *made, const void *code, void *a, void *b, unsigned c, void *d, void *e, unsigned f)
{
    *made = made_anew();
    return SUCCESS;
}
Result cuLibraryUnload(Handle library) { return SUCCESS; }
Result cuLibraryGetKernel(Handle *made, Handle library, const char *name) { *made = made_anew(); return SUCCESS; }
Result cuKernelSetAttribute(int attribute, int value, Handle kernel, int device) { return SUCCESS; }
Result cuLaunchKernel(Handle kernel, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned f,
                      unsigned shared, Handle stream, void **arguments, void **extra)
{
    return SUCCESS;
}
Result cuLaunchKernelEx(const void *config, Handle kernel, void **arguments, void **extra) { return SUCCESS; }
Result cuTensorMapEncodeTiled(void *map, ...) { memset(map, 0, 128); return SUCCESS; }
Result cuProfilerStart(void) { return SUCCESS; }
Result cuProfilerStop(void) { return SUCCESS; }
Result cuGetErrorName(Result error, const char **name) { *name = "PRETENDED_ERROR"; return SUCCESS; }
Result cuGetErrorString(Result error, const char **text) { *text = "not pretended"; return SUCCESS; }

static Result missing(void) { return NOT_SUPPORTED; }

/* The newest function of a name that this file has. CUDA's own names the versions in the same way. */
Result cuGetProcAddress_v2(const char *name, void **found, int version, uint64_t flags, int *status)
{
    static const char *const suffixes[] = {"_v3", "_v2", ""};
    char whole[128];
    *found = NULL;
    for (int place = 0; place < 3 && !*found; place++) {
        snprintf(whole, sizeof whole, "%s%s", name, suffixes[place]);
        *found = dlsym(RTLD_DEFAULT, whole);
        if (!*found) {
            Dl_info here;
            if (dladdr((void *)missing, &here)) {
                void *self = dlopen(here.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
                *found = self ? dlsym(self, whole) : NULL;
            }
        }
    }
    if (!*found) {
        if (getenv("PRETENDED_LOG"))
            fprintf(stderr, "no %s\n", name);
        *found = (void *)missing;
    }
    if (status)
        *status = 0;
    return SUCCESS;
}
