/* A libcuda for tests: the calls that the copy process makes, on GPUs that do nothing but take time by the book.
 *
 * Time is virtual: a copy takes bytes / rate, the first on a stream ten times as long, the third three times.
 * Host to GPU d runs at 50 + d GB/s, back at 40 + d; GPU a to b at 400 - 10 a GB/s, or 20 without peer access.
 * Handles and addresses need 64 bits. What is not as the driver wants it is refused with CUDA_ERROR_INVALID_VALUE.
 *
 * FAKE_CUDA_GPUS=2, FAKE_CUDA_FREE=bytes of free memory, FAKE_CUDA_NO_PEERS=1, FAKE_CUDA_FAIL=call[,call],
 * FAKE_CUDA_HANG=call, FAKE_CUDA_CRASH=call; FAKE_CUDA_LOG=file gets what was never given back.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 100, INVALID_CONTEXT = 201, ENABLED = 704 };
enum { GPUS = 8 };

typedef struct { int device, retained, peers[GPUS]; } Context;
typedef struct { Context *context; int copies; } Stream;
typedef struct { double at_ms; int recorded; } Event;
typedef struct { uint64_t address; size_t size; } Block;

static Context contexts[GPUS];
static Context *current;
static Block blocks[GPUS];
static void *host;
static size_t host_size;
static double now_ms;
static int streams, events;

static int listed(const char *variable, const char *call)
{
    const char *names = getenv(variable), *at = names ? strstr(names, call) : NULL;
    return at && (at == names || at[-1] == ',') && (at[strlen(call)] == 0 || at[strlen(call)] == ',');
}

static int refused(const char *call)
{
    if (listed("FAKE_CUDA_CRASH", call))
        abort();
    while (listed("FAKE_CUDA_HANG", call))
        sleep(1);
    return listed("FAKE_CUDA_FAIL", call);
}

#define FAILS if (refused(__func__)) return OUT_OF_MEMORY

static int gpus(void)
{
    const char *wish = getenv("FAKE_CUDA_GPUS");
    return wish ? atoi(wish) : 2;
}

__attribute__((destructor)) static void leave(void)
{
    const char *path = getenv("FAKE_CUDA_LOG");
    FILE *log = path ? fopen(path, "w") : NULL;
    int held = 0, retained = 0;
    for (int i = 0; i < GPUS; i++)
        held += blocks[i].size != 0, retained += contexts[i].retained;
    if (log) {
        fprintf(log, "memory %d host %d contexts %d streams %d events %d\n", held, host != NULL, retained, streams, events);
        fclose(log);
    }
}

int cuInit(unsigned flags) { FAILS; return flags ? INVALID_VALUE : gpus() ? OK : NO_DEVICE; }

int cuGetErrorString(int code, const char **text)
{
    *text = code == OUT_OF_MEMORY ? "out of memory" : code == NO_DEVICE ? "no CUDA-capable device is detected" : NULL;
    return *text ? OK : INVALID_VALUE;
}

int cuDeviceGetCount(int *count) { FAILS; *count = gpus(); return OK; }

int cuDeviceGet(int *device, int ordinal) { FAILS; *device = ordinal; return ordinal < gpus() ? OK : INVALID_VALUE; }

int cuDeviceGetUuid_v2(char *uuid, int device)
{
    FAILS;
    memset(uuid, 0, 16);
    uuid[15] = (char)device;
    return OK;
}

int cuDevicePrimaryCtxRetain(Context **context, int device)
{
    FAILS;
    contexts[device].device = device;
    contexts[device].retained++;
    *context = &contexts[device];
    return OK;
}

int cuDevicePrimaryCtxRelease_v2(int device) { contexts[device].retained--; return OK; }

int cuCtxSetCurrent(Context *context)
{
    FAILS;
    if (context < contexts || context >= contexts + GPUS || !context->retained)
        return INVALID_CONTEXT;
    current = context;
    return OK;
}

int cuDeviceCanAccessPeer(int *can, int device, int peer)
{
    FAILS;
    *can = device != peer && !getenv("FAKE_CUDA_NO_PEERS");
    return OK;
}

int cuCtxEnablePeerAccess(Context *peer, unsigned flags)
{
    FAILS;
    if (flags || peer == current)
        return INVALID_VALUE;
    if (current->peers[peer->device]++)
        return ENABLED;
    return OK;
}

int cuMemGetInfo_v2(size_t *available, size_t *total)
{
    FAILS;
    const char *wish = getenv("FAKE_CUDA_FREE");
    *total = 141ull << 30;
    *available = wish ? strtoull(wish, NULL, 10) : *total;
    return current ? OK : INVALID_CONTEXT;
}

int cuMemAlloc_v2(uint64_t *address, size_t size)
{
    FAILS;
    if (!current)
        return INVALID_CONTEXT;
    *address = 0x7f0000000000ull + ((uint64_t)current->device << 40);
    blocks[current->device] = (Block){*address, size};
    return OK;
}

int cuMemFree_v2(uint64_t address)
{
    if (!current || blocks[current->device].address != address)
        return INVALID_VALUE;
    blocks[current->device] = (Block){0, 0};
    return OK;
}

int cuMemHostAlloc(void **address, size_t size, unsigned flags)
{
    FAILS;
    if (flags != 1 || !current)
        return INVALID_VALUE;
    host = *address = malloc(host_size = size);
    return OK;
}

int cuMemFreeHost(void *address)
{
    if (address != host)
        return INVALID_VALUE;
    free(host);
    host = NULL;
    return OK;
}

static int is_on(int device, uint64_t address, size_t size)
{
    return device >= 0 && blocks[device].address == address && size && size <= blocks[device].size;
}

static int copy(Stream *stream, size_t size, double gb_per_s)
{
    double ms = size / gb_per_s / 1e6;
    int number = stream->copies++;
    now_ms += number == 0 ? 10 * ms : number == 2 ? 3 * ms : ms;
    return OK;
}

int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t size, Stream *stream)
{
    FAILS;
    int device = stream->context->device;
    if (!is_on(device, to, size) || from != host || size > host_size)
        return INVALID_VALUE;
    return copy(stream, size, 50 + device);
}

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, Stream *stream)
{
    FAILS;
    int device = stream->context->device;
    if (!is_on(device, from, size) || to != host || size > host_size)
        return INVALID_VALUE;
    return copy(stream, size, 40 + device);
}

int cuMemcpyPeerAsync(uint64_t to, Context *to_context, uint64_t from, Context *from_context, size_t size, Stream *stream)
{
    FAILS;
    int a = from_context->device, b = to_context->device;
    if (!is_on(a, from, size) || !is_on(b, to, size) || stream->context != from_context)
        return INVALID_VALUE;
    return copy(stream, size, from_context->peers[b] && to_context->peers[a] ? 400 - 10 * a : 20);
}

int cuStreamCreate(Stream **stream, unsigned flags)
{
    FAILS;
    *stream = calloc(1, sizeof **stream);
    (*stream)->context = current;
    streams++;
    return flags == 1 ? OK : INVALID_VALUE;
}

int cuStreamDestroy_v2(Stream *stream) { streams--; free(stream); return OK; }

int cuEventCreate(Event **event, unsigned flags)
{
    FAILS;
    *event = calloc(1, sizeof **event);
    events++;
    return flags ? INVALID_VALUE : OK;
}

int cuEventDestroy_v2(Event *event) { events--; free(event); return OK; }

int cuEventRecord(Event *event, Stream *stream)
{
    FAILS;
    event->at_ms = now_ms;
    event->recorded = 1;
    return stream->context == current ? OK : INVALID_CONTEXT;
}

int cuEventSynchronize(Event *event) { FAILS; return event->recorded ? OK : INVALID_VALUE; }

int cuEventElapsedTime(float *ms, Event *begin, Event *end)
{
    FAILS;
    *ms = (float)(end->at_ms - begin->at_ms);
    return begin->recorded && end->recorded ? OK : INVALID_VALUE;
}
