/* A libcupti for tests: PM sampling as the sampler uses it. With HELPER, the libraries beside it.
 *
 * It behaves as libcupti 13.4 was seen to on an H200: the first sample of an object begins at 0, and that of a later
 * start where the last one before it ended; a decoding consumes all samples that wait, also those that do not fit into
 * the image; a metric of a unit that the GPU lacks leaves every sample incomplete, and so does a second configuration of
 * one sampling object; a second object is refused when it is configured, not when it is enabled; a hardware buffer that
 * ran over stays so until the object is made anew.
 *
 * FAKE_PM_FAIL=privileges|busy|crash|hang|some; FAKE_PM_LACKS=unit; FAKE_PM_APART=metric: one pass cannot take it with others;
 * FAKE_PM_DECODE_US=microseconds that decoding one sample takes; FAKE_PM_ROOM=samples that the hardware buffer holds.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { OK = 0, INVALID_PARAMETER = 1, OUT_OF_MEMORY = 8, HARDWARE_BUSY = 26, PRIVILEGES = 35 };
enum { METRICS_MAX = 64, NAME_MAX_ = 128 };

int cuInit(unsigned flags)
{
    (void)flags;
    return getenv("FAKE_CUDA_INIT") ? atoi(getenv("FAKE_CUDA_INIT")) : 0;
}

int cuDriverGetVersion(int *version)
{
    *version = 13000;
    return 0;
}

#ifndef HELPER

typedef struct { char names[METRICS_MAX][NAME_MAX_]; int count; } Config;
typedef struct { Config config; int configured, running; uint64_t interval, start, decoded, last; int overflow; } Object;
typedef struct { uint32_t capacity, populated, complete; uint32_t pad; uint64_t times[][2]; } Image;

static const char *known[] = {
    "lts__t_sectors", "lts__average_t_sector_hit_rate_realtime", "dram__bytes_read", "dram__bytes_write",
    "l1tex__t_sectors", "l1tex__t_sectors_lookup_hit", "sm__cycles_active", "sm__inst_executed_realtime",
    "sm__pipe_tensor_cycles_active", "pcie__read_bytes", "pcie__write_bytes", "nvltx__bytes_data_user",
    "nvlrx__bytes_data_user",
};
enum { KNOWN = sizeof known / sizeof *known };

static int wish(const char *name, const char *value)
{
    const char *set = getenv(name);
    return set && !strcmp(set, value);
}

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

#define AT(type, offset) (*(type *)((uint8_t *)params + (offset)))

int cuptiGetResultString(int code, const char **text)
{
    (void)code;
    *text = "fake";
    return OK;
}

int cuptiProfilerInitialize(void *params) { (void)params; return OK; }
int cuptiProfilerDeInitialize(void *params) { (void)params; return OK; }

int cuptiDeviceGetChipName(void *params)
{
    if (AT(uint64_t, 16) > 0)
        return INVALID_PARAMETER;
    AT(const char *, 24) = "GH100";
    return OK;
}

int cuptiPmSamplingEnable(void *params)
{
    if (wish("FAKE_PM_FAIL", "privileges"))
        return PRIVILEGES;
    if (wish("FAKE_PM_FAIL", "crash"))
        abort();
    while (wish("FAKE_PM_FAIL", "hang"))
        pause();
    AT(void *, 24) = calloc(1, sizeof(Object));
    return OK;
}

static Object *holder; /* a GPU is configured for one object at a time */

int cuptiPmSamplingDisable(void *params)
{
    if (holder == AT(Object *, 16))
        holder = NULL;
    free(AT(void *, 16));
    return OK;
}

int cuptiPmSamplingSetConfig(void *params)
{
    if (wish("FAKE_PM_FAIL", "busy"))
        return HARDWARE_BUSY;
    Object *o = AT(Object *, 16);
    if (holder && holder != o)
        return HARDWARE_BUSY;
    holder = o;
    memcpy(&o->config, AT(void *, 32), sizeof o->config);
    o->configured++;
    o->interval = AT(uint64_t, 48);
    return OK;
}

int cuptiPmSamplingStart(void *params)
{
    Object *o = AT(Object *, 16);
    o->running = 1;
    o->start = now();
    o->decoded = 0;
    return OK;
}

static uint64_t taken(Object *o)
{
    return (now() - o->start) / o->interval;
}

static uint64_t stopped_at;

int cuptiPmSamplingStop(void *params)
{
    Object *o = AT(Object *, 16);
    stopped_at = taken(o);
    o->running = 0;
    return OK;
}

int cuptiPmSamplingGetCounterDataSize(void *params)
{
    AT(uint64_t, 48) = sizeof(Image) + AT(uint32_t, 40) * 16ull;
    return OK;
}

int cuptiPmSamplingCounterDataImageInitialize(void *params)
{
    Image *image = AT(Image *, 32);
    image->capacity = (AT(uint64_t, 24) - sizeof *image) / 16;
    image->populated = image->complete = 0;
    return OK;
}

static int lacks(Object *o)
{
    const char *unit = getenv("FAKE_PM_LACKS");
    for (int i = 0; unit && i < o->config.count; i++)
        if (!strncmp(o->config.names[i], unit, strlen(unit)))
            return 1;
    return o->configured > 1;
}

int cuptiPmSamplingDecodeData(void *params)
{
    Object *o = AT(Object *, 16);
    Image *image = AT(Image *, 24);
    uint64_t have = o->running ? taken(o) : stopped_at, waiting = have - o->decoded;
    const char *room = getenv("FAKE_PM_ROOM"), *slow = getenv("FAKE_PM_DECODE_US");
    if (room && waiting > (uint64_t)atoll(room))
        o->overflow = 1;
    AT(uint8_t, 44) = o->overflow;
    if (o->overflow)
        return OUT_OF_MEMORY;
    uint32_t count = waiting < image->capacity ? waiting : image->capacity;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t k = o->decoded + i;
        image->times[i][0] = k ? o->start + k * o->interval : o->last;
        image->times[i][1] = o->start + (k + 1) * o->interval;
    }
    if (have > o->decoded)
        o->last = o->start + have * o->interval;
    if (slow)
        usleep(waiting * atoll(slow));
    o->decoded = have;
    image->populated = count;
    image->complete = lacks(o) ? 0 : count;
    return OK;
}

int cuptiPmSamplingGetCounterDataInfo(void *params)
{
    Image *image = AT(Image *, 16);
    AT(uint64_t, 32) = image->capacity;
    AT(uint64_t, 40) = image->populated;
    AT(uint64_t, 48) = image->complete;
    return OK;
}

int cuptiPmSamplingCounterDataGetSampleInfo(void *params)
{
    Image *image = AT(Image *, 24);
    uint64_t k = AT(uint64_t, 40);
    if (wish("FAKE_PM_FAIL", "some") && k % 4 == 2)
        return INVALID_PARAMETER;
    AT(uint64_t, 48) = image->times[k][0];
    AT(uint64_t, 56) = image->times[k][1];
    return OK;
}

/* ---- the host side ---------------------------------------------------------------------------- */

int cuptiProfilerHostInitialize(void *params)
{
    AT(void *, 40) = calloc(1, sizeof(Config));
    return OK;
}

int cuptiProfilerHostDeinitialize(void *params)
{
    free(AT(void *, 16));
    return OK;
}

int cuptiProfilerHostConfigAddMetrics(void *params)
{
    Config *config = AT(Config *, 16);
    const char **names = AT(const char **, 24);
    for (uint64_t i = 0; i < AT(uint64_t, 32); i++) {
        int found = 0;
        for (int j = 0; j < KNOWN; j++)
            found |= !strncmp(names[i], known[j], strlen(known[j])) && strchr(".\0", names[i][strlen(known[j])]);
        if (!found)
            return INVALID_PARAMETER;
        snprintf(config->names[config->count++], NAME_MAX_, "%s", names[i]);
    }
    return OK;
}

int cuptiProfilerHostGetConfigImageSize(void *params)
{
    AT(uint64_t, 24) = sizeof(Config);
    return OK;
}

int cuptiProfilerHostGetConfigImage(void *params)
{
    memcpy(AT(void *, 32), AT(void *, 16), sizeof(Config));
    return OK;
}

int cuptiProfilerHostGetNumOfPasses(void *params)
{
    const Config *config = AT(const Config *, 24);
    const char *apart = getenv("FAKE_PM_APART");
    AT(uint64_t, 32) = 1;
    for (int i = 0; apart && config->count > 1 && i < config->count; i++)
        if (!strcmp(config->names[i], apart))
            AT(uint64_t, 32) = 2;
    return OK;
}

int cuptiProfilerHostGetBaseMetrics(void *params)
{
    AT(const char **, 32) = AT(int32_t, 24) == 0 ? known : NULL;
    AT(uint64_t, 40) = AT(int32_t, 24) == 0 ? KNOWN : 0;
    return OK;
}

/* Bytes read: 3 a nanosecond; L2 sectors: 2 a nanosecond, half of them hits; the rest 1 a sample. */
int cuptiProfilerHostEvaluateToGpuValues(void *params)
{
    Image *image = AT(Image *, 24);
    uint64_t k = AT(uint64_t, 40), ns = image->times[k][1] - image->times[k][0];
    if (wish("FAKE_PM_FAIL", "some") && k % 4 == 1)
        return INVALID_PARAMETER;
    const char **names = AT(const char **, 48);
    double *values = AT(double *, 64);
    for (uint64_t i = 0; i < AT(uint64_t, 56); i++)
        values[i] = !strcmp(names[i], "dram__bytes_read.sum") ? 3.0 * ns
                  : !strcmp(names[i], "lts__t_sectors.sum") ? 2.0 * ns
                  : strstr(names[i], ".pct") ? 50.0 : 1.0;
    return OK;
}

#endif
