/* Ballots of ranks on one node: compares and repeats the rows of a page that all of them have mapped.

   `ballots.py` describes the page, and calls this through ctypes with the interpreter held. It has
   no Python in it. Between two steps of a training nothing of this is in a core's cache, and Python
   takes 90 microseconds for what is here a few lines of memory. */

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define PUBLIC __attribute__((visibility("default")))

/* Increased with every change of the functions or structures below. */
#define BALLOTS_INTERFACE 4

typedef struct {
    uint8_t *page;
    uint64_t ranks, rank;
    uint64_t first;     /* where the rows of the turns 0, TURNS, 2 * TURNS, ... start */
    uint64_t turns;     /* turns with rows of their own */
    uint64_t row_bytes; /* from one rank's row to the next */
    uint64_t written;   /* bytes of a row, and then 4 of its checksum */
    uint64_t place;     /* where a row has the place, and after it the complement */
    uint64_t iterations; /* where the page has this rank's completed iterations */
} box;

static uint8_t *row_of(const box *b, uint64_t turn, uint64_t rank) {
    return b->page + b->first + ((turn % b->turns) * b->ranks + rank) * b->row_bytes;
}

/* zlib's crc32, four bits at a time: no table worth mentioning is to come into the cache. */
static uint32_t checksum(const uint8_t *data, uint64_t nbytes) {
    static const uint32_t of[16] = {
        0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
        0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
        0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
    };
    uint32_t sum = UINT32_MAX;
    for (uint64_t i = 0; i < nbytes; i++) {
        sum ^= data[i];
        sum = (sum >> 4) ^ of[sum & 15];
        sum = (sum >> 4) ^ of[sum & 15];
    }
    return ~sum;
}

PUBLIC uint32_t tierckpt_ballots_interface(void) { return BALLOTS_INTERFACE; }

/* 1 if all ranks have cast this rank's vote of that turn, and gave nothing along. A row has its turn
   and a checksum in it, so equal ones are complete. */
PUBLIC int tierckpt_ballots_unanimous(const box *b, uint64_t turn) {
    const uint8_t *own = row_of(b, turn, b->rank);
    uint64_t head[2];
    memcpy(head, own, sizeof head);
    if (head[0] != turn || head[1] != 0)
        return 0;
    for (uint64_t rank = 0; rank < b->ranks; rank++)
        if (memcmp(row_of(b, turn, rank), own, b->written + sizeof(uint32_t)))
            return 0;
    return 1;
}

static void write_again(const box *b, uint64_t turn, int64_t place) {
    uint8_t *row = row_of(b, turn + 1, b->rank);
    int64_t places[2] = {place, ~place};
    memcpy(row + sizeof turn, row_of(b, turn, b->rank) + sizeof turn, b->written - sizeof turn);
    memcpy(row + b->place, places, sizeof places);
    turn++;
    memcpy(row, &turn, sizeof turn);
    uint32_t sum = checksum(row, b->written);
    memcpy(row + b->written, &sum, sizeof sum);
}

/* If all ranks have cast this rank's vote of that turn: casts it again, as the next turn's and with
   another place, which is also the number of its completed iterations. Else -1, and nothing is done.
   0, and no vote is written, if the next one is there already: an interrupt came after it was
   written, and others may have read it. */
PUBLIC int tierckpt_ballots_repeat(const box *b, uint64_t turn, int64_t place) {
    if (!tierckpt_ballots_unanimous(b, turn))
        return -1;
    uint64_t there;
    memcpy(&there, row_of(b, turn + 1, b->rank), sizeof there);
    int is_new = there != turn + 1;
    if (is_new)
        write_again(b, turn, place);
    __atomic_thread_fence(__ATOMIC_RELEASE); /* a rank with more iterations than votes is stuck */
    memcpy(b->page + b->iterations, &place, sizeof place);
    return is_new;
}
