/* A libcupti for tests: the calls that the agent makes, and records that look like those of libcupti 13.0.
 *
 * It behaves as the real one was seen to: full buffers are delivered by a worker thread, cuptiActivityFlushAll
 * delivers the rest on its caller's thread, a refused buffer drops records and counts them, one subscriber at
 * a time; calls are recorded where they were switched on one by one, for the first time before anything was launched;
 * switched off by one thread while another is launching, all later calls of that thread come under one correlation id.
 * The program under test makes the GPU work through the fake_* functions, so that counts are exact.
 *
 * FAKE_CUPTI_FAIL=register|enable|subscribe|flush makes that call fail; =hang lets a flush never return; =hold is a
 * kernel that was in flight when kernels were first switched off, and gets no end: all later buffers wait for it, and
 * new ones are asked for, until a flush is forced.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef void (*Request)(uint8_t **buffer, size_t *size, size_t *records);
typedef void (*Complete)(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid);
typedef void (*Callback)(void *user, int domain, uint32_t cbid, const void *data);

enum { OK = 0, UNKNOWN_ERROR = 999, MULTIPLE_SUBSCRIBERS = 39 };
enum { MEMCPY = 1, MEMSET = 2, DRIVER = 4, RUNTIME = 5, DEVICE = 8, KERNEL = 10, KINDS = 64 };
enum { KERNEL_BYTES = 216, CALL_BYTES = 40, DEVICE_BYTES = 184 };
enum { CU_LAUNCH_KERNEL = 307, LAUNCH_KERNEL = 211, PROFILER_START = 171, PROFILER_STOP = 172, CALLS = 1024 };
enum { QUEUE = 64, HELD = 4096, NAMES_MAX = 10000 };

typedef struct { uint8_t *data; size_t size, used; Request request; Complete complete; } Buffer;

static pthread_mutex_t lock = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static pid_t worker_pid;
static Request request;
static Complete complete;
static uint64_t (*clock_now)(void);
static uint8_t kind_on[KINDS], call_on[CALLS];
static pthread_t generator;
static int generating, frozen, launched, hooked;
static Buffer current, queue[QUEUE], held[HELD];
static int queued, held_count, endless; /* a kernel without an end is there */
static unsigned long handed, delivered; /* buffers, ever */
static size_t dropped;
static uint32_t correlation;
static Callback subscriber;
static void *subscriber_data;
static uint8_t resource_on[64], profiler_on, launches_on;

/* The head of CUpti_CallbackData. */
typedef struct {
    int site;
    const char *function;
    const void *parameters;
    void *result;
    const char *symbol;
    void *context;
    uint32_t context_uid;
    uint64_t *data;
    uint32_t correlation;
} Call;
static char names[NAMES_MAX][64];
static int names_made;

static int fails(const char *what)
{
    const char *wish = getenv("FAKE_CUPTI_FAIL");
    return wish && !strcmp(wish, what);
}

static uint64_t now(void)
{
    if (clock_now)
        return clock_now();
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static char *name_of(int number)
{
    char plain[32];
    for (; names_made <= number; names_made++) {
        int n = snprintf(plain, sizeof plain, "fake_gemm_%d", names_made);
        snprintf(names[names_made], sizeof names[0], "_Z%d%sPfi", n, plain);
    }
    return names[number];
}

/* ---- buffers ---------------------------------------------------------------------------------- */

static void *work(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&lock);
    for (;;) {
        while (!queued)
            pthread_cond_wait(&changed, &lock);
        Buffer full = queue[0];
        memmove(queue, queue + 1, --queued * sizeof *queue);
        pthread_mutex_unlock(&lock);
        full.complete(NULL, 0, full.data, full.size, full.used);
        pthread_mutex_lock(&lock);
        delivered++;
        pthread_cond_broadcast(&changed);
    }
    return NULL;
}

static void hand_over(int by_worker)
{
    Buffer full = current;
    memset(&current, 0, sizeof current);
    if (!full.data)
        return;
    if (endless && held_count < HELD)
        held[held_count++] = full;
    else if (by_worker && worker_pid == getpid() && queued < QUEUE) {
        queue[queued++] = full;
        handed++;
        pthread_cond_broadcast(&changed);
    } else /* a forked child has no worker */
        full.complete(NULL, 0, full.data, full.size, full.used);
}

static void *room(size_t bytes)
{
    if (current.data && current.size - current.used < bytes)
        hand_over(1);
    if (!current.data && request) {
        size_t records = 0;
        Buffer fresh = {.request = request, .complete = complete};
        request(&fresh.data, &fresh.size, &records);
        current = fresh;
    }
    if (!current.data) {
        dropped++;
        return NULL;
    }
    void *at = current.data + current.used;
    current.used += bytes;
    memset(at, 0, bytes);
    return at;
}

#define PUT(record, offset, type, value) (*(type *)((uint8_t *)(record) + (offset)) = (value))

static void put_call(uint32_t cbid, uint32_t correlation, uint64_t start, uint64_t end)
{
    void *r = room(CALL_BYTES);
    if (!r)
        return;
    PUT(r, 0, uint32_t, RUNTIME);
    PUT(r, 4, uint32_t, cbid);
    PUT(r, 8, uint64_t, start);
    PUT(r, 16, uint64_t, end);
    PUT(r, 24, uint32_t, getpid());
    PUT(r, 28, uint32_t, syscall(SYS_gettid));
    PUT(r, 32, uint32_t, correlation);
}

static void put_kernel(uint64_t start, uint64_t end, uint32_t correlation, const char *name)
{
    void *r = room(KERNEL_BYTES);
    if (!r)
        return;
    PUT(r, 0, uint32_t, KERNEL);
    PUT(r, 6, uint16_t, 32);
    PUT(r, 16, uint64_t, start);
    PUT(r, 24, uint64_t, end);
    PUT(r, 44, uint32_t, 1);
    PUT(r, 48, uint32_t, 7);
    for (int i = 52; i < 76; i += 4)
        PUT(r, i, int32_t, i == 64 ? 128 : 1);
    PUT(r, 92, uint32_t, correlation);
    PUT(r, 104, const char *, name);
}

/* ---- what the agent calls --------------------------------------------------------------------- */

int cuptiGetVersion(uint32_t *version)
{
    *version = 130001;
    return OK;
}

int cuptiGetTimestamp(uint64_t *t)
{
    *t = now();
    return OK;
}

int cuptiGetResultString(int code, const char **text)
{
    *text = code == MULTIPLE_SUBSCRIBERS ? "CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED" : "CUPTI_ERROR_UNKNOWN";
    return OK;
}

static void in_child(void)
{
    static const pthread_mutex_t fresh = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;
    lock = fresh;
    queued = 0;
    delivered = handed;
}

int cuptiActivityRegisterCallbacks(Request r, Complete c)
{
    if (fails("register"))
        return UNKNOWN_ERROR;
    pthread_mutex_lock(&lock);
    request = r;
    complete = c;
    if (!worker_pid) {
        pthread_t thread;
        worker_pid = getpid();
        pthread_atfork(NULL, NULL, in_child);
        pthread_create(&thread, NULL, work, NULL);
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuptiActivityRegisterTimestampCallback(uint64_t (*clock)(void))
{
    clock_now = clock;
    return OK;
}

/* libcupti 13.0 dies of copies and memsets that are switched while a launch of another thread is recorded. */
static void switched(int kind)
{
    if ((kind == MEMCPY || kind == MEMSET) && kind_on[KERNEL] && generating && !pthread_equal(generator, pthread_self()))
        abort();
}

int cuptiActivityEnable(int kind)
{
    if (fails("enable"))
        return UNKNOWN_ERROR;
    switched(kind);
    kind_on[kind] = 1;
    return OK;
}

int cuptiActivityDisable(int kind)
{
    switched(kind);
    endless |= kind == KERNEL && fails("hold");
    kind_on[kind] = 0;
    return OK;
}

int cuptiActivityEnableRuntimeApi(uint32_t cbid, uint8_t on)
{
    if (call_on[cbid] && !on && generating && !pthread_equal(generator, pthread_self()))
        frozen = 1;
    hooked |= !launched;
    call_on[cbid] = on && hooked;
    return OK;
}

int cuptiActivityEnableDriverApi(uint32_t cbid, uint8_t on)
{
    (void)cbid, (void)on;
    return OK;
}

int cuptiActivityEnableAndDump(int kind)
{
    pthread_mutex_lock(&lock);
    void *r = kind == DEVICE ? room(DEVICE_BYTES) : NULL;
    if (r) {
        PUT(r, 0, uint32_t, DEVICE);
        PUT(r, 8, uint64_t, 4800000000ull);
        PUT(r, 16, uint64_t, 141ull << 30);
        PUT(r, 28, uint32_t, 50 << 20);
        PUT(r, 44, uint32_t, 132);
        PUT(r, 104, uint32_t, 9);
        memset((uint8_t *)r + 120, 0xfa, 16);
        PUT(r, 136, const char *, "NVIDIA H200");
    }
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuptiActivityFlushAll(uint32_t flag)
{
    if (fails("flush"))
        return UNKNOWN_ERROR;
    while (fails("hang"))
        pause();
    pthread_mutex_lock(&lock);
    for (unsigned long now_handed = handed; delivered < now_handed && worker_pid == getpid();)
        pthread_cond_wait(&changed, &lock);
    endless &= !(flag & 1);
    for (int i = 0; !endless && i < held_count; i++)
        held[i].complete(NULL, 0, held[i].data, held[i].size, held[i].used);
    held_count = endless ? held_count : 0;
    if (current.used)
        hand_over(0);
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuptiActivityGetNumDroppedRecords(void *context, uint32_t stream, size_t *count)
{
    (void)context, (void)stream;
    pthread_mutex_lock(&lock);
    *count = dropped;
    dropped = 0;
    pthread_mutex_unlock(&lock);
    return OK;
}

int cuptiSubscribe(void **handle, Callback callback, void *data)
{
    if (fails("subscribe") || subscriber)
        return MULTIPLE_SUBSCRIBERS;
    subscriber = callback;
    subscriber_data = data;
    *handle = &subscriber;
    return OK;
}

int cuptiUnsubscribe(void *handle)
{
    (void)handle;
    subscriber = NULL;
    memset(resource_on, 0, sizeof resource_on);
    profiler_on = launches_on = 0;
    return OK;
}

int cuptiEnableCallback(uint32_t on, void *handle, int domain, uint32_t cbid)
{
    (void)handle;
    if (domain == 3)
        resource_on[cbid] = on;
    else if (domain == 2 && (cbid == PROFILER_START || cbid == PROFILER_STOP))
        profiler_on = on;
    else if (domain == 1 && cbid == CU_LAUNCH_KERNEL)
        launches_on = on;
    return OK;
}

int cuptiGetGraphNodeId(void *node, uint64_t *id)
{
    *id = (uint64_t)(uintptr_t)node;
    return OK;
}

int cuptiGetGraphId(void *graph, uint32_t *id)
{
    *id = (uint32_t)(uintptr_t)graph;
    return OK;
}

/* ---- what the program under test calls -------------------------------------------------------- */

static void call_back(int site, uint32_t correlation)
{
    Call call = {.site = site, .function = "cuLaunchKernel", .correlation = correlation};
    Callback to = subscriber;
    if (to && launches_on)
        to(subscriber_data, 1, CU_LAUNCH_KERNEL, &call);
}

/* One launch and its kernel, recorded if that is on. */
static void launch(const char *name)
{
    pthread_mutex_lock(&lock);
    launched = 1;
    if (!frozen)
        correlation++;
    uint32_t mine = correlation;
    pthread_mutex_unlock(&lock);
    call_back(0, mine);
    pthread_mutex_lock(&lock);
    uint64_t begin = now();
    if (call_on[LAUNCH_KERNEL])
        put_call(LAUNCH_KERNEL, mine, begin, begin + 500);
    if (kind_on[KERNEL])
        put_kernel(begin + 1000, begin + 3000, mine, name);
    pthread_mutex_unlock(&lock);
    call_back(1, mine);
}

void fake_launch(int count)
{
    for (int i = 0; i < count; i++)
        launch(name_of(i % 3));
}

/* As many kernels, each of another name. */
void fake_launch_distinct(int count)
{
    for (int i = 0; i < count; i++)
        launch(name_of(i));
}

/* Kernels whose name is a pointer to anything. */
void fake_launch_at(int count, const char *name)
{
    for (int i = 0; i < count; i++)
        launch(name);
}

static void *generate(void *per_second)
{
    for (;;) {
        launch(name_of(0));
        usleep(1000000 / (intptr_t)per_second);
    }
    return NULL;
}

/* A thread of the driver's that goes on launching. */
void fake_generate(int per_second)
{
    generating = 1;
    pthread_create(&generator, NULL, generate, (void *)(intptr_t)per_second);
}

/* Capture a graph of so many nodes and instantiate it: each node is created, then its clone. */
void fake_capture(int count)
{
    struct { void *graph, *original_graph, *node, *original_node; int type; void *dependency, *exec; } graph;
    struct { void *context, *handle, *descriptor; } resource = {NULL, NULL, &graph};
    memset(&graph, 0, sizeof graph);
    graph.graph = (void *)3;
    for (intptr_t i = 1; i <= count; i++) {
        graph.node = (void *)i;
        graph.original_node = NULL;
        if (subscriber && resource_on[13])
            subscriber(subscriber_data, 3, 13, &resource);
        graph.node = (void *)(i + 1000000);
        if (subscriber && resource_on[13]) /* a clone is created, too */
            subscriber(subscriber_data, 3, 13, &resource);
        graph.original_node = (void *)i;
        if (subscriber && resource_on[20])
            subscriber(subscriber_data, 3, 20, &resource);
    }
}

/* cudaProfilerStart and cudaProfilerStop. */
void fake_profiler(int start)
{
    for (int site = 0; site < 2; site++)
        if (subscriber && profiler_on)
            subscriber(subscriber_data, 2, start ? PROFILER_START : PROFILER_STOP, &site);
}

/* ---- another profiler in the process, as torch.profiler's Kineto ------------------------------- */

static int guest_kernels;

static void guest_request(uint8_t **buffer, size_t *size, size_t *records)
{
    *size = 1 << 20;
    *buffer = malloc(*size);
    *records = 0;
}

static void guest_complete(void *context, uint32_t stream, uint8_t *buffer, size_t size, size_t valid)
{
    (void)context, (void)stream, (void)size;
    for (size_t at = 0; at + CALL_BYTES <= valid;) {
        uint32_t kind = *(uint32_t *)(buffer + at);
        guest_kernels += kind == KERNEL;
        at += kind == KERNEL ? KERNEL_BYTES : kind == DEVICE ? DEVICE_BYTES : CALL_BYTES;
    }
    free(buffer);
}

static uint64_t ticks(void)
{
    return 12345;
}

/* 39 and no kernels when somebody else is subscribed. */
int fake_guest_begin(void)
{
    void *handle;
    int code = cuptiSubscribe(&handle, (Callback)(void *)ticks, NULL);
    guest_kernels = 0;
    if (code)
        return code;
    pthread_mutex_lock(&lock);
    if (current.used)
        hand_over(0);
    memset(&current, 0, sizeof current);
    cuptiActivityRegisterCallbacks(guest_request, guest_complete);
    clock_now = ticks;
    kind_on[KERNEL] = 1;
    hooked = 0;
    launched = 1;
    memset(call_on, 0, sizeof call_on);
    pthread_mutex_unlock(&lock);
    return OK;
}

/* How many kernels it got. Its callbacks and its clock stay behind. */
int fake_guest_end(void)
{
    if (complete != guest_complete)
        return -1;
    kind_on[KERNEL] = 0;
    cuptiActivityFlushAll(0);
    cuptiUnsubscribe(NULL);
    return guest_kernels;
}
