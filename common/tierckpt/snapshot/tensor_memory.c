/* Tensor memory: compares what torch keeps about tensors, and Python about its objects, with a record.

   `tensor_memory.py` calls it through ctypes. It has no Python and no torch in it: the offsets of all
   fields come from the caller, found by experiments. All addresses are in the record, so nothing is
   followed before it is known to be the same, and the next tensors' memory is fetched ahead. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

/* Increased with every change of the functions or structures below. */
#define INTERFACE 3

/* Tensors with memory asked for ahead: some 100 ns of work, which a miss of the caches takes. */
#define AHEAD 16

typedef struct {
    uint64_t object;  /* Python's */
    uint64_t tensor;  /* torch's, to which `object` refers */
    uint64_t storage; /* to which `tensor` refers */
    uint64_t data;    /* the storage's memory */
    uint64_t nbytes;
    uint64_t counter; /* to which `tensor` refers; 0: none */
    uint64_t kind;    /* number of the shape, strides and type, in `kinds` */
    uint64_t meta;    /* where autograd's part was, to fetch it ahead; 0: none */
    uint64_t trained; /* whether it requires a gradient */
} record;

typedef struct {
    uint64_t tensor_in_object;
    uint64_t storage_in_tensor, counter_in_tensor;
    uint64_t kind_in_tensor, kind_bytes;
    uint64_t data_in_storage, nbytes_in_storage;
    uint64_t value_in_counter; /* 32 bits */
    uint64_t meta_in_tensor;   /* 0 there: no gradient is required */
    uint64_t flag_in_meta, flag_bit;
} offsets;

/* Some memory, and the bytes that were there; both are addresses. */
typedef struct {
    uint64_t address, nbytes, known;
} span;

/* Tensors, with the arguments of `tierckpt_first_changed`. */
typedef struct {
    const record *records;
    uint64_t count;
    const uint8_t *kinds;
    uint32_t *counters;
} table;

/* All that a boundary compares. */
typedef struct {
    const offsets *at;
    const table *tables;
    uint64_t table_count;
    const span *fixed; /* an address in the bytes of a span is used only by spans after it */
    uint64_t fixed_count;
    const span *followed;
    uint64_t followed_count;
    uint64_t *changed; /* room for the numbers of all followed spans */
} guard;

#define CHANGED UINT64_MAX

static uint64_t word(uint64_t address) {
    uint64_t found;
    memcpy(&found, (const void *)(uintptr_t)address, sizeof found);
    return found;
}

static void fetch(uint64_t address) { __builtin_prefetch((const void *)(uintptr_t)address); }

static int same_storage(const offsets *at, const record *r) {
    return word(r->storage + at->data_in_storage) == r->data &&
           word(r->storage + at->nbytes_in_storage) == r->nbytes;
}

static void read_counter(const offsets *at, const record *r, uint32_t *counter) {
    *counter = 0;
    if (r->counter)
        memcpy(counter, (const void *)(uintptr_t)(r->counter + at->value_in_counter), sizeof *counter);
}

static uint64_t trained(const offsets *at, uint64_t tensor) {
    uint64_t meta = word(tensor + at->meta_in_tensor);
    const uint8_t *flag = (const uint8_t *)(uintptr_t)(meta + at->flag_in_meta);
    return meta && (*flag & at->flag_bit) != 0;
}

PUBLIC uint32_t tierckpt_tensor_memory_interface(void) { return INTERFACE; }

/* Number of the first tensor not as in its record, else `count`; reads all counters before
   it. The objects must be alive, and nothing may change them during the call. */
PUBLIC uint64_t tierckpt_first_changed(const offsets *at, const record *records, uint64_t count,
                                       const uint8_t *kinds, uint32_t *counters) {
    for (uint64_t i = 0; i < count; i++) {
        const record *r = &records[i];
        if (i + AHEAD < count) {
            const record *next = &records[i + AHEAD];
            fetch(next->object + at->tensor_in_object);
            for (uint64_t line = 0; line < at->kind_in_tensor + at->kind_bytes; line += 64)
                fetch(next->tensor + line);
            fetch(next->tensor + at->kind_in_tensor + at->kind_bytes - 1);
            fetch(next->storage + at->data_in_storage);
            fetch(next->storage + at->nbytes_in_storage);
            fetch(next->counter + at->value_in_counter);
            fetch(next->meta + at->flag_in_meta);
        }
        if (word(r->object + at->tensor_in_object) != r->tensor ||
            word(r->tensor + at->storage_in_tensor) != r->storage ||
            word(r->tensor + at->counter_in_tensor) != r->counter ||
            memcmp((const void *)(uintptr_t)(r->tensor + at->kind_in_tensor),
                   kinds + r->kind * at->kind_bytes, at->kind_bytes) != 0 ||
            !same_storage(at, r) || trained(at, r->tensor) != r->trained)
            return i;
        read_counter(at, r, &counters[i]);
    }
    return count;
}

/* Number of the first tensor with other memory in its storage, else `count`; reads all counters
   before it. The storages and counters must be alive. Other threads may change them. */
PUBLIC uint64_t tierckpt_first_moved(const offsets *at, const record *records, uint64_t count,
                                     uint32_t *counters) {
    for (uint64_t i = 0; i < count; i++) {
        if (i + AHEAD < count) {
            fetch(records[i + AHEAD].storage + at->data_in_storage);
            fetch(records[i + AHEAD].storage + at->nbytes_in_storage);
            fetch(records[i + AHEAD].counter + at->value_in_counter);
        }
        if (!same_storage(at, &records[i]))
            return i;
        read_counter(at, &records[i], &counters[i]);
    }
    return count;
}

/* Read `words` words at each of these addresses. */
PUBLIC void tierckpt_words(const uint64_t *addresses, uint64_t count, uint64_t words, uint64_t *found) {
    for (uint64_t i = 0; i < count; i++) {
        if (i + 2 * AHEAD < count)
            fetch(addresses[i + 2 * AHEAD]);
        memcpy(found + i * words, (const void *)(uintptr_t)addresses[i], words * sizeof *found);
    }
}

static int same(const span *s) {
    const void *now = (const void *)(uintptr_t)s->address, *known = (const void *)(uintptr_t)s->known;
    return s->nbytes == sizeof(uint64_t) ? word(s->address) == word(s->known)
                                         : memcmp(now, known, s->nbytes) == 0;
}

/* Note the bytes of these spans, in order. The memory must be that of live objects. */
PUBLIC void tierckpt_note(const span *spans, uint64_t count) {
    for (const span *s = spans; s < spans + count; s++)
        memcpy((void *)(uintptr_t)s->known, (const void *)(uintptr_t)s->address, s->nbytes);
}

/* CHANGED if a fixed span or a tensor is not as it was. Else the number of followed spans that have
   changed, with their numbers in `changed`, and their new bytes noted. Reads all counters. As
   `tierckpt_first_changed`, it expects that nothing changes meanwhile, except followed spans. */
PUBLIC uint64_t tierckpt_look(const guard *g) {
    uint64_t found = 0;
    for (uint64_t i = 0; i < g->fixed_count; i++) {
        if (i + AHEAD < g->fixed_count)
            fetch(g->fixed[i + AHEAD].address);
        if (!same(&g->fixed[i]))
            return CHANGED;
    }
    for (const table *t = g->tables; t < g->tables + g->table_count; t++)
        if (tierckpt_first_changed(g->at, t->records, t->count, t->kinds, t->counters) != t->count)
            return CHANGED;
    for (uint64_t i = 0; i < g->followed_count; i++) {
        if (i + AHEAD < g->followed_count)
            fetch(g->followed[i + AHEAD].address);
        if (!same(&g->followed[i])) {
            tierckpt_note(&g->followed[i], 1);
            g->changed[found++] = i;
        }
    }
    return found;
}
