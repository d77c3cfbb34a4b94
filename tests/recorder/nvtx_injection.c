/* An NVTX tool for tests: counts push/pop ranges of domain "hicache" by message and by thread, checks that they nest,
 * and writes one JSON object to the file named by HICACHE_OBS_NVTX_SUMMARY when the process exits. The file named by
 * HICACHE_OBS_NVTX_RANGES, if any, gets one line per closed range: native thread id, message, payload.
 *
 * cc -shared -fPIC -o injection.so nvtx_injection.c; NVTX_INJECTION64_PATH=injection.so HICACHE_OBS_NVTX_SUMMARY=...
 * The numbers of modules, callbacks and struct fields are NVTX 3's (nvtxTypes.h, nvtxImplCore.h).
 */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef void (*Function)(void);
typedef struct { size_t size; int (*table)(int module, Function*** out, unsigned* count); } Callbacks;
typedef const void* (*GetExport)(uint32_t id);

typedef struct {
  uint16_t version, size;
  uint32_t category;
  int32_t color_type;
  uint32_t color;
  int32_t payload_type, reserved;
  int64_t payload;
  int32_t message_type;
  const void* message;
} Attributes;

enum { CORE = 1, CORE2 = 5, PAYLOAD_INT64 = 2, MESSAGE_REGISTERED = 3, MAX_NAMES = 64, MAX_THREADS = 64, MAX_DEPTH = 64 };

typedef struct { char name[64]; long opened, closed; long long payload_sum; } Message;
typedef struct { long opened, closed; int depth, deepest; int stack[MAX_DEPTH]; long long payloads[MAX_DEPTH]; } Thread;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char* names[MAX_NAMES];
static int name_count;
static Message messages[MAX_NAMES];
static int message_count;
static Thread threads[MAX_THREADS];
static int thread_count;
static long empty_pops, unregistered, without_payload, other_domains;
static __thread int me = -1;
static FILE* ranges;

/* Domains and registered strings are both handed out as pointers to their names. */
static void* keep(const char* text) {
  pthread_mutex_lock(&lock);
  int at = 0;
  while (at < name_count && strcmp(names[at], text)) at++;
  if (at == name_count && name_count < MAX_NAMES) names[name_count++] = strdup(text);
  pthread_mutex_unlock(&lock);
  return names[at];
}
static void* create_domain(const char* name) { return keep(name); }
static void* register_string(void* domain, const char* text) { (void)domain; return keep(text); }

static Thread* mine(void) {
  if (me < 0) me = thread_count < MAX_THREADS - 1 ? thread_count++ : MAX_THREADS - 1;
  return &threads[me];
}

static int push(void* domain, const Attributes* a) {
  pthread_mutex_lock(&lock);
  int depth = 0;
  if (!domain || strcmp(domain, "hicache")) {
    other_domains++;
  } else {
    const char* text = "(unregistered)";
    if (a->message_type == MESSAGE_REGISTERED) text = a->message; else unregistered++;
    if (a->payload_type != PAYLOAD_INT64) without_payload++;
    int at = 0;
    while (at < message_count && strcmp(messages[at].name, text)) at++;
    if (at == message_count) snprintf(messages[message_count++].name, sizeof messages[0].name, "%s", text);
    messages[at].opened++;
    messages[at].payload_sum += a->payload;
    Thread* t = mine();
    t->opened++;
    if (t->depth < MAX_DEPTH) {
      t->stack[t->depth] = at;
      t->payloads[t->depth] = a->payload;
    }
    depth = t->depth++;
    if (t->depth > t->deepest) t->deepest = t->depth;
  }
  pthread_mutex_unlock(&lock);
  return depth;
}

static int pop(void* domain) {
  pthread_mutex_lock(&lock);
  int depth = -1;
  if (domain && !strcmp(domain, "hicache")) {
    Thread* t = mine();
    if (!t->depth) {
      empty_pops++;
    } else {
      depth = --t->depth;
      t->closed++;
      if (depth < MAX_DEPTH) {
        Message* m = &messages[t->stack[depth]];
        m->closed++;
        if (ranges) fprintf(ranges, "%ld %s %lld\n", (long)syscall(SYS_gettid), m->name, t->payloads[depth]);
      }
    }
  }
  pthread_mutex_unlock(&lock);
  return depth;
}

static void summary(void) {
  pthread_mutex_lock(&lock);
  if (ranges) fclose(ranges);
  ranges = NULL;
  pthread_mutex_unlock(&lock);
  const char* path = getenv("HICACHE_OBS_NVTX_SUMMARY");
  FILE* f = path ? fopen(path, "w") : NULL;
  if (!f) return;
  fprintf(f, "{\"messages\": {");
  for (int i = 0; i < message_count; i++)
    fprintf(f, "%s\"%s\": {\"opened\": %ld, \"closed\": %ld, \"payload_sum\": %lld}", i ? ", " : "", messages[i].name,
            messages[i].opened, messages[i].closed, messages[i].payload_sum);
  fprintf(f, "}, \"threads\": [");
  for (int i = 0; i < thread_count; i++)
    fprintf(f, "%s{\"opened\": %ld, \"closed\": %ld, \"deepest\": %d}", i ? ", " : "", threads[i].opened,
            threads[i].closed, threads[i].deepest);
  fprintf(f, "], \"empty_pops\": %ld, \"unregistered\": %ld, \"without_payload\": %ld, \"other_domains\": %ld}\n",
          empty_pops, unregistered, without_payload, other_domains);
  fclose(f);
}

static void name_category(void* domain, uint32_t category, const char* name) { (void)domain; (void)category; (void)name; }
static void initialize(const void* reserved) { (void)reserved; }

static void set(const Callbacks* callbacks, int module, unsigned id, Function function) {
  Function** table;
  unsigned count;
  if (callbacks->table(module, &table, &count) && id < count && table[id]) *table[id] = function;
}

int InitializeInjectionNvtx2(GetExport get) {
  const Callbacks* callbacks = get(1);
  if (!callbacks) return 0;
  set(callbacks, CORE2, 4, (Function)push);
  set(callbacks, CORE2, 5, (Function)pop);
  set(callbacks, CORE2, 8, (Function)name_category);
  set(callbacks, CORE2, 10, (Function)register_string);
  set(callbacks, CORE2, 12, (Function)create_domain);
  set(callbacks, CORE2, 15, (Function)initialize);
  const char* path = getenv("HICACHE_OBS_NVTX_RANGES");
  if (path) ranges = fopen(path, "w");
  atexit(summary);
  return 1;
}
