/* Copy engine: copies and hashes the blocks of one version without the interpreter.

   `copy_engine.py` calls it through ctypes, which releases the GIL; it has no Python in it and starts
   no thread. A *plan* (segments and blocks) belongs to the caller and does not change. A *job* is one
   copy of a plan into one target; its memory belongs to the caller as well. Any number of threads
   may work on a job.

   A block is held, then released, then taken by one thread, then done. The lock is held for a few
   dozen instructions, and never during a copy. A thread sleeps only on a futex, and is woken only if
   it has something to do. */

#define _GNU_SOURCE
#include <endian.h>
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if UINTPTR_MAX < UINT64_MAX
#error "the copy engine needs 64-bit addresses; Tierckpt copies with torch instead"
#endif

#define PUBLIC __attribute__((visibility("default")))

/* Increased with every change of the functions or structures below. */
#define INTERFACE 6

typedef uint64_t (*hash_function)(const void *data, size_t nbytes);

typedef struct {
    uint64_t address;
    uint64_t nbytes;
} segment;

/* The version counters of some tensors: see tensor_memory.c, which knows the structures. */
typedef struct {
    const void *offsets, *records;
    uint64_t count;
    uint32_t *now; /* room for them */
} counters;

uint64_t tierckpt_first_moved(const void *offsets, const void *records, uint64_t count, uint32_t *now);

typedef struct {
    uint64_t first_segment;
    uint64_t segments;
    uint64_t offset; /* in the target */
    uint64_t nbytes; /* the sum of the segments' */
} block;

enum { COMPLETE, ABORTED, IDLE, UNFINISHED };

typedef struct {
    hash_function hash;
    const segment *segments;
    const block *blocks;
    uint8_t *target;
    pthread_mutex_t lock;
    _Atomic uint32_t turn; /* the futex: changes whenever a sleeper should look again */
    uint32_t count;        /* blocks */
    uint32_t released, taken, done;
    uint32_t copying;  /* blocks that a thread writes now */
    uint32_t workers;  /* threads that sleep until blocks are released */
    uint32_t leavers;  /* threads that sleep until no block is being copied */
    uint32_t aborted;
    uint32_t streams; /* this processor can `stream` */
    uint32_t queue_offset, state_offset;
    const counters *watched; /* NULL if the caller compares them */
    const uint32_t *before;  /* their values at the boundary */
    uint64_t unchanged;      /* the results start here: 1 once a barrier has found the same values */
    uint64_t copy_ns, hash_ns; /* work of all threads */
    uint64_t head_digest;
    uint64_t digests[]; /* count + 1, little endian; then the queue (uint32_t), the states (uint8_t) */
} job;

/* The copier's desk: where it waits for one job at a time, without the interpreter. */
typedef struct {
    pthread_mutex_t lock;
    _Atomic uint32_t turn; /* the futex, as in a job */
    uint32_t sleepers;
    uint32_t rung;    /* the interpreter has other work */
    uint32_t settled; /* the last job needs no thread any more */
    uint32_t started; /* the copier uses the job's memory */
    job *job;         /* NULL if there is none */
    const job *last;  /* the job posted last */
} desk;

enum { HELD, RELEASED };

static uint32_t *queue_of(job *j) { return (uint32_t *)((uint8_t *)j + j->queue_offset); }
static uint8_t *states_of(job *j) { return (uint8_t *)j + j->state_offset; }

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* --- waiting; with the lock held ----------------------------------------------------------------- */

/* Sleep until the next wake-up, or for `timeout_ns`; returns 0 after a time-out. */
static int sleep_on(pthread_mutex_t *lock, _Atomic uint32_t *turn, uint32_t *sleepers,
                    uint64_t timeout_ns) {
    struct timespec limit = {(time_t)(timeout_ns / 1000000000u), (long)(timeout_ns % 1000000000u)};
    uint32_t seen = atomic_load(turn);
    ++*sleepers;
    pthread_mutex_unlock(lock);
    long slept = syscall(SYS_futex, turn, FUTEX_WAIT_PRIVATE, seen, &limit, NULL, 0);
    int timed_out = slept == -1 && errno == ETIMEDOUT;
    pthread_mutex_lock(lock);
    --*sleepers;
    return !timed_out;
}

/* Wake all sleepers if there are `sleepers`. */
static void wake_on(_Atomic uint32_t *turn, uint32_t sleepers) {
    if (sleepers == 0)
        return;
    atomic_fetch_add(turn, 1);
    syscall(SYS_futex, turn, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

static int sleep_locked(job *j, uint32_t *sleepers, uint64_t timeout_ns) {
    return sleep_on(&j->lock, &j->turn, sleepers, timeout_ns);
}

static void wake_locked(job *j, uint32_t sleepers) { wake_on(&j->turn, sleepers); }

/* --- one block ----------------------------------------------------------------------------------- */

/* Copies past the caches: nobody reads the target soon, and it evicts nothing of the training. With
   stores of 64 bytes they are faster than memcpy, too; with smaller ones it is slower. */
#if defined(__x86_64__)
__attribute__((target("avx512f"))) static void stream(uint8_t *to, const uint8_t *from, size_t nbytes) {
    size_t head = (size_t)(-(uintptr_t)to & 63u);
    if (head > nbytes)
        head = nbytes;
    memcpy(to, from, head);
    to += head, from += head, nbytes -= head;
    for (; nbytes >= 64; to += 64, from += 64, nbytes -= 64)
        _mm512_stream_si512((__m512i *)to, _mm512_loadu_si512(from));
    memcpy(to, from, nbytes);
    _mm_sfence();
}
static int can_stream(void) { return __builtin_cpu_supports("avx512f"); }
#else
static void stream(uint8_t *to, const uint8_t *from, size_t nbytes) { memcpy(to, from, nbytes); }
static int can_stream(void) { return 0; }
#endif

/* A block of one segment is hashed from its source, which is in the core's cache then, and streamed.
   Others are gathered in the target, and hashed there. */
static uint64_t copy_block(const job *j, const block *b, uint64_t *hash_ns) {
    uint8_t *to = j->target + b->offset;
    const segment *s = j->segments + b->first_segment;
    uint64_t start, digest;
    if (b->segments == 1 && j->streams) {
        const uint8_t *from = (const uint8_t *)(uintptr_t)s->address;
        start = now_ns();
        digest = j->hash(from, b->nbytes);
        *hash_ns = now_ns() - start;
        stream(to, from, b->nbytes);
        return digest;
    }
    for (uint64_t i = 0, done = 0; i < b->segments; done += s[i++].nbytes)
        memcpy(to + done, (const void *)(uintptr_t)s[i].address, s[i].nbytes);
    start = now_ns();
    digest = j->hash(to, b->nbytes);
    *hash_ns = now_ns() - start;
    return digest;
}

/* Take a released block, with the lock held; -1 if there is none. */
static int64_t take_locked(job *j) {
    if (j->aborted || j->target == NULL || j->taken == j->released)
        return -1;
    return queue_of(j)[j->taken++];
}

/* Copy a taken block; the lock is released meanwhile. Returns when it was copied. */
static uint64_t copy_locked(job *j, uint32_t number) {
    uint64_t hash_ns, start = now_ns();
    j->copying++;
    pthread_mutex_unlock(&j->lock);
    uint64_t digest = copy_block(j, &j->blocks[number], &hash_ns);
    uint64_t end = now_ns();
    j->digests[number] = htole64(digest);
    pthread_mutex_lock(&j->lock);
    j->copy_ns += end - start - hash_ns;
    j->hash_ns += hash_ns;
    j->copying--;
    j->done++;
    if (j->done == j->taken && j->taken == j->released)
        wake_locked(j, j->done == j->count ? j->leavers + j->workers : j->leavers);
    return end;
}

static int state_locked(const job *j) {
    return j->aborted ? ABORTED : j->done == j->count ? COMPLETE : IDLE;
}

/* --- interface ----------------------------------------------------------------------------------- */

PUBLIC uint32_t tierckpt_interface(void) { return INTERFACE; }

PUBLIC uint64_t tierckpt_hash(hash_function hash, const void *data, uint64_t nbytes) {
    return hash(data, nbytes);
}

/* Memory of a job of `count` blocks. */
PUBLIC uint64_t tierckpt_job_bytes(uint32_t count) {
    return sizeof(job) + sizeof(uint64_t) +
           (uint64_t)count * (sizeof(uint64_t) + sizeof(uint32_t) + 1);
}

/* Where the results are: whether a barrier found no source changed, nanoseconds of copying and of
   hashing, then the digests of the image's head, of the blocks, of its tail. */
PUBLIC uint64_t tierckpt_results_offset(void) { return offsetof(job, unchanged); }

/* Start a job in zeroed memory, with all blocks held. */
PUBLIC void tierckpt_init(job *j, hash_function hash, const segment *segments, const block *blocks,
                          uint32_t count) {
    j->hash = hash;
    j->segments = segments;
    j->blocks = blocks;
    j->count = count;
    j->streams = (uint32_t)can_stream();
    j->queue_offset = (uint32_t)(offsetof(job, digests) + (count + 1) * sizeof(uint64_t));
    j->state_offset = (uint32_t)(j->queue_offset + count * sizeof(uint32_t));
    pthread_mutex_init(&j->lock, NULL);
}

/* Set the target: the address of the first block's offset 0. */
PUBLIC void tierckpt_bind(job *j, uint8_t *target) {
    pthread_mutex_lock(&j->lock);
    j->target = target;
    wake_locked(j, j->workers);
    pthread_mutex_unlock(&j->lock);
}

/* Allow the copy of these blocks, of all blocks if `blocks` is NULL. */
PUBLIC void tierckpt_release(job *j, const uint32_t *blocks, uint32_t count) {
    pthread_mutex_lock(&j->lock);
    uint32_t before = j->released;
    if (blocks == NULL)
        count = before == j->count ? 0 : j->count;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t number = blocks == NULL ? i : blocks[i];
        if (states_of(j)[number] == HELD) {
            states_of(j)[number] = RELEASED;
            queue_of(j)[j->released++] = number;
        }
    }
    if (j->released != before)
        wake_locked(j, j->workers);
    pthread_mutex_unlock(&j->lock);
}

/* Take one released block; -1 if there is none. Then call `copy_one`, or `abort`. */
PUBLIC int64_t tierckpt_take(job *j) {
    pthread_mutex_lock(&j->lock);
    int64_t number = take_locked(j);
    pthread_mutex_unlock(&j->lock);
    return number;
}

/* Copy a taken block; returns when it was copied: before the last block, another thread may seal. */
PUBLIC uint64_t tierckpt_copy_one(job *j, uint32_t number) {
    pthread_mutex_lock(&j->lock);
    uint64_t end = copy_locked(j, number);
    pthread_mutex_unlock(&j->lock);
    return end;
}

/* Wait until a block may be taken (UNFINISHED), or as `run`. */
PUBLIC int tierckpt_wait(job *j, uint64_t timeout_ns) {
    int state, awake = 1;
    pthread_mutex_lock(&j->lock);
    for (;;) {
        int ready = !j->aborted && j->target != NULL && j->taken != j->released;
        state = ready ? UNFINISHED : state_locked(j);
        if (state != IDLE || timeout_ns == 0 || !awake)
            break;
        awake = sleep_locked(j, &j->workers, timeout_ns);
    }
    pthread_mutex_unlock(&j->lock);
    return state;
}

/* Copy released blocks until all are done (COMPLETE), the job is aborted (ABORTED), or none was
   released for `timeout_ns` (IDLE). */
PUBLIC int tierckpt_run(job *j, uint64_t timeout_ns) {
    int state, awake = 1;
    pthread_mutex_lock(&j->lock);
    for (;;) {
        int64_t number = take_locked(j);
        state = state_locked(j);
        if (number >= 0) {
            copy_locked(j, (uint32_t)number);
            awake = 1;
        } else if (state != IDLE || timeout_ns == 0 || !awake) {
            break;
        } else {
            awake = sleep_locked(j, &j->workers, timeout_ns);
        }
    }
    pthread_mutex_unlock(&j->lock);
    return state;
}

/* 1 if all tensors have the memory and the version counters that they had at the boundary. */
static int unchanged(const job *j) {
    const counters *w = j->watched;
    return w != NULL && tierckpt_first_moved(w->offsets, w->records, w->count, w->now) == w->count &&
           memcmp(w->now, j->before, w->count * sizeof *w->now) == 0;
}

PUBLIC void tierckpt_settle(desk *d, const job *j);

/* Copy released blocks, and wait until no thread copies one; then compare the counters, and settle
   the job at the desk if they are unchanged. Returns as `run`: IDLE if blocks are held; UNFINISHED
   after about `budget_bytes`, or after a wait of `timeout_ns`: call again. For the barrier's thread
   alone. */
PUBLIC int tierckpt_help(job *j, uint64_t budget_bytes, uint64_t timeout_ns, desk *d) {
    int state, awake = 1;
    pthread_mutex_lock(&j->lock);
    for (;;) {
        int64_t number = budget_bytes ? take_locked(j) : -1;
        state = state_locked(j);
        if (number >= 0) {
            uint64_t nbytes = j->blocks[number].nbytes;
            budget_bytes -= nbytes < budget_bytes ? nbytes : budget_bytes;
            copy_locked(j, (uint32_t)number);
        } else if (state != IDLE || j->done == j->released) {
            break;
        } else if (budget_bytes == 0 || !awake) {
            state = UNFINISHED;
            break;
        } else {
            awake = sleep_locked(j, &j->leavers, timeout_ns);
        }
    }
    if (state == COMPLETE)
        j->unchanged = (uint64_t)unchanged(j);
    int is_over = state == COMPLETE && j->unchanged && d != NULL;
    pthread_mutex_unlock(&j->lock);
    if (is_over)
        tierckpt_settle(d, j); /* without the job's lock: `post` takes it with the desk's */
    return state;
}

/* End the job: no block is started any more, and all sleepers return. */
PUBLIC void tierckpt_abort(job *j) {
    pthread_mutex_lock(&j->lock);
    j->aborted = 1;
    wake_locked(j, j->workers + j->leavers);
    pthread_mutex_unlock(&j->lock);
}

/* 1 while a thread writes a block. */
PUBLIC uint32_t tierckpt_copying(job *j) {
    pthread_mutex_lock(&j->lock);
    uint32_t copying = j->copying;
    pthread_mutex_unlock(&j->lock);
    return copying != 0;
}

/* --- the copier's desk --------------------------------------------------------------------------- */

PUBLIC uint64_t tierckpt_desk_bytes(void) { return sizeof(desk); }

/* Start a desk in zeroed memory. */
PUBLIC void tierckpt_desk_init(desk *d) {
    pthread_mutex_init(&d->lock, NULL);
    d->settled = 1;
}

/* Copy head and tail of the image, around its blocks; the tail is followed by zeros up to
   `tail_room`. Release all blocks, and leave the job for the copier. Returns 0, and does nothing, if
   the copier still uses another job. The job's memory must stay until a later call has returned 1. */
PUBLIC uint32_t tierckpt_post(desk *d, job *j, uint8_t *image, const void *head, uint64_t head_bytes,
                              uint64_t blocks_bytes, const void *tail, uint64_t tail_bytes,
                              uint64_t tail_room, const counters *watched, const uint32_t *before) {
    uint8_t *end = image + head_bytes + blocks_bytes;
    pthread_mutex_lock(&d->lock);
    uint32_t posted = d->job == NULL;
    if (posted) {
        memcpy(image, head, head_bytes);
        memcpy(end, tail, tail_bytes);
        memset(end + tail_bytes, 0, tail_room - tail_bytes);
        j->head_digest = htole64(j->hash(image, head_bytes));
        j->digests[j->count] = htole64(j->hash(end, tail_room));
        j->watched = watched;
        j->before = before;
        tierckpt_bind(j, image + head_bytes);
        tierckpt_release(j, NULL, 0);
        d->job = j;
        d->last = j;
        d->settled = 0;
        wake_on(&d->turn, d->sleepers);
    }
    pthread_mutex_unlock(&d->lock);
    return posted;
}

/* This job is over: the copier need not return for it. */
PUBLIC void tierckpt_settle(desk *d, const job *j) {
    pthread_mutex_lock(&d->lock);
    if (d->last == j)
        d->settled = 1;
    if (d->job == j && !d->started)
        d->job = NULL;
    pthread_mutex_unlock(&d->lock);
}

/* Have `serve` return. */
PUBLIC void tierckpt_ring(desk *d) {
    pthread_mutex_lock(&d->lock);
    d->rung = 1;
    wake_on(&d->turn, d->sleepers);
    pthread_mutex_unlock(&d->lock);
}

/* Copy as `run`, but return COMPLETE when no block is left to be taken. */
static int assist(job *j, uint64_t timeout_ns) {
    int state, awake = 1;
    pthread_mutex_lock(&j->lock);
    for (;;) {
        int64_t number = take_locked(j);
        state = j->aborted ? ABORTED : j->taken == j->count ? COMPLETE : IDLE;
        if (number >= 0) {
            copy_locked(j, (uint32_t)number);
            awake = 1;
        } else if (state != IDLE || !awake) {
            break;
        } else {
            awake = sleep_locked(j, &j->workers, timeout_ns);
        }
    }
    pthread_mutex_unlock(&j->lock);
    return state;
}

/* The copier's wait: copy each posted job, and return if there is something for the interpreter.
   UNFINISHED: it was rung. COMPLETE: nobody has settled the job `linger_ns` after the copy. ABORTED:
   the job was aborted. IDLE: there was no job, or no release of its blocks, for `timeout_ns`. */
PUBLIC int tierckpt_serve(desk *d, uint64_t timeout_ns, uint64_t linger_ns) {
    int state = IDLE;
    pthread_mutex_lock(&d->lock);
    for (;;) {
        if (d->job != NULL) {
            job *j = d->job;
            d->started = 1;
            pthread_mutex_unlock(&d->lock);
            state = assist(j, timeout_ns);
            pthread_mutex_lock(&d->lock);
            d->started = 0;
            d->job = NULL;
            if (state != COMPLETE)
                break;
        } else if (d->rung) {
            d->rung = 0;
            state = UNFINISHED;
            break;
        } else {
            int lingers = !d->settled;
            int awake = sleep_on(&d->lock, &d->turn, &d->sleepers, lingers ? linger_ns : timeout_ns);
            if (awake || d->job != NULL || (lingers && d->settled))
                continue;
            state = lingers ? COMPLETE : IDLE;
            break;
        }
    }
    if (state == COMPLETE || state == ABORTED)
        d->settled = 1; /* by the caller */
    pthread_mutex_unlock(&d->lock);
    return state;
}

/* --- small versions ------------------------------------------------------------------------------ */

/* Fill an image, on this thread alone: as `post` and `help` together. `j` is a job that no thread
   uses; its digests are the results, as those of a posted one. */
PUBLIC void tierckpt_fill(job *j, uint8_t *image, const void *head, uint64_t head_bytes,
                          uint64_t blocks_bytes, const void *tail, uint64_t tail_bytes,
                          uint64_t tail_room) {
    uint8_t *end = image + head_bytes + blocks_bytes;
    uint64_t hash_ns, start = now_ns();
    j->target = image + head_bytes;
    j->copy_ns = j->hash_ns = 0;
    memcpy(image, head, head_bytes);
    j->head_digest = htole64(j->hash(image, head_bytes));
    for (uint32_t i = 0; i < j->count; i++) {
        j->digests[i] = htole64(copy_block(j, &j->blocks[i], &hash_ns));
        j->hash_ns += hash_ns;
    }
    memcpy(end, tail, tail_bytes);
    memset(end + tail_bytes, 0, tail_room - tail_bytes);
    j->digests[j->count] = htole64(j->hash(end, tail_room));
    j->copy_ns = now_ns() - start - j->hash_ns;
    j->unchanged = 1;
}

/* --- copies by a device -------------------------------------------------------------------------- */

/* cudaMemcpyAsync. Its address is the caller's: nothing of CUDA is needed to build this. */
typedef int (*copy_async)(void *to, const void *from, size_t nbytes, int kind, void *stream);

enum { BY_ADDRESS = 4 }; /* cudaMemcpyDefault: the addresses tell which side is the device */

/* Enqueue the copies of these blocks into `target`, the address of offset 0. Segments that are
   adjacent on both sides are one copy, up to `most_bytes`, if they have the same of `owners`: CUDA
   refuses a copy that spans two allocations, also where their addresses are adjacent. Returns CUDA's
   first error, or 0. */
PUBLIC int tierckpt_enqueue(copy_async copy, void *stream, const segment *segments,
                            const uint32_t *owners, const block *blocks, const uint32_t *numbers,
                            uint32_t count, uint8_t *target, uint64_t most_bytes) {
    uint8_t *to = NULL;
    const uint8_t *from = NULL;
    uint64_t nbytes = 0;
    uint32_t owner = 0;
    for (uint32_t i = 0; i < count; i++) {
        const block *b = &blocks[numbers[i]];
        uint8_t *next = target + b->offset;
        for (uint64_t k = 0; k < b->segments; k++) {
            const segment *s = &segments[b->first_segment + k];
            const uint8_t *source = (const uint8_t *)(uintptr_t)s->address;
            uint32_t its_owner = owners[b->first_segment + k];
            if (nbytes && source == from + nbytes && next == to + nbytes && its_owner == owner &&
                nbytes + s->nbytes <= most_bytes) {
                nbytes += s->nbytes;
            } else {
                int error = nbytes ? copy(to, from, nbytes, BY_ADDRESS, stream) : 0;
                if (error)
                    return error;
                to = next, from = source, nbytes = s->nbytes, owner = its_owner;
            }
            next += s->nbytes;
        }
    }
    return nbytes ? copy(to, from, nbytes, BY_ADDRESS, stream) : 0;
}

/* Hash these blocks of `target`; their digests, little endian, in the order of `numbers`. */
PUBLIC void tierckpt_hash_blocks(hash_function hash, const block *blocks, const uint32_t *numbers,
                                 uint32_t count, const uint8_t *target, uint64_t *digests) {
    for (uint32_t i = 0; i < count; i++) {
        const block *b = &blocks[numbers[i]];
        digests[i] = htole64(hash(target + b->offset, b->nbytes));
    }
}
