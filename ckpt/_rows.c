/* The hot loops of row guards: marking rows that are about to change, copying a block of a table as
   it was when a snapshot opened, and the prints of rows. Loaded through ctypes by ckpt/native.py,
   whose structures mirror the ones here; ckpt/rows/torch_pool.py and ckpt/rows/prints.py do the
   same in torch and are the reference.

   Memory order. Exactly one thread appends (under Python's lock), one at a time copies, and they
   meet without locks:
     touch: reads `upto`, appends the old row, publishes it (release), and only then returns, so
            that the row's change comes after.
     copy:  copies rows [a, b), publishes upto = b, fences, and only then reads what was appended.
   So a row that touch doesn't append has been copied before; and one that is appended after copy
   looked is changed only after it was copied. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define AHEAD 16    /* prefetch distance, in ids */
#define SLOTS 16    /* snapshots open at a time */
#define PARTS 8     /* components of a table */
#define HEAD 16     /* bytes of a record before its row: row number, tag before, tag after */

#if defined(_WIN32)
#error "POSIX only"
#endif

typedef struct {
    uint8_t *tag;              /* [rows] the epoch of each row's last touch */
    _Atomic int32_t *first;    /* [chunks] newest slab of each chunk, -1: none */
    int64_t rows;
    int64_t chunk_rows;
    uint64_t magic;            /* ceil(2^64 / chunk_rows): divides 32-bit rows; 0: divide plainly */
    int64_t record_bytes;      /* HEAD and one row of each component, in whole words */
    int64_t parts;
    char *part[PARTS];         /* live memory of each component */
    int64_t width[PARTS];      /* bytes of its rows */
    _Atomic int64_t upto[SLOTS]; /* rows that the snapshot of each slot has */
} table_t;

typedef struct {
    char *slabs;
    int32_t *next;             /* [slab] older slab of the same chunk, -1: none */
    _Atomic int32_t *count;    /* [slab] records in it */
    int32_t *free_slabs;       /* stack of free slabs */
    int64_t n_free;
    int64_t slab_bytes;
    int64_t epoch;             /* tag of rows touched now */
    int64_t open[SLOTS];       /* epoch of the snapshot of each slot, 0: none */
    int64_t stop_segment;      /* where touch ran out of slabs */
    int64_t stop_at;
} pool_t;

static inline int64_t chunk_of(const table_t *t, int64_t row) {
    return t->magic ? (int64_t)(((unsigned __int128)(uint64_t)row * t->magic) >> 64) : row / t->chunk_rows;
}

static inline int64_t row_at(const void *ids, int wide, int64_t i, int64_t rows) {
    int64_t row = wide ? ((const int64_t *)ids)[i] : (int64_t)((const int32_t *)ids)[i];
    return (uint64_t)row < (uint64_t)rows ? row : 0; /* lookups take bad ids for row 0 */
}

/* Old row -> its chunk's slab. 0 when there is no slab left. */
static int append(pool_t *p, table_t *t, int64_t row, uint8_t before) {
    int64_t chunk = chunk_of(t, row);
    int32_t slab = atomic_load_explicit(&t->first[chunk], memory_order_relaxed);
    int32_t n = slab < 0 ? 0 : atomic_load_explicit(&p->count[slab], memory_order_relaxed);
    if (slab < 0 || (n + 1) * t->record_bytes > p->slab_bytes) {
        if (!p->n_free) return 0;
        int32_t fresh = p->free_slabs[--p->n_free];
        atomic_store_explicit(&p->count[fresh], 0, memory_order_relaxed);
        p->next[fresh] = slab;
        atomic_store_explicit(&t->first[chunk], fresh, memory_order_release);
        slab = fresh, n = 0;
    }
    char *to = p->slabs + (int64_t)slab * p->slab_bytes + n * t->record_bytes;
    memcpy(to, &row, 8);
    to[8] = (char)before, to[9] = (char)p->epoch;
    to += HEAD;
    for (int64_t k = 0; k < t->parts; k++) {
        memcpy(to, t->part[k] + row * t->width[k], t->width[k]);
        to += t->width[k];
    }
    atomic_store_explicit(&p->count[slab], n + 1, memory_order_release);
    return 1;
}

/* Mark the rows ids[bounds[s], bounds[s+1]) of tables[s], from (segment, at) on. Returns 1 when all
   are done, 0 when the overlay is full: (stop_segment, stop_at) is where to go on. */
int rows_touch(pool_t *p, table_t **tables, const int64_t *bounds, int64_t segments, const void *ids,
               int wide, int64_t segment, int64_t at) {
    uint8_t now = (uint8_t)p->epoch;
    int slots[SLOTS], n_open = 0;
    for (int s = 0; s < SLOTS; s++) if (p->open[s]) slots[n_open++] = s;
    for (; segment < segments; segment++) {
        table_t *t = tables[segment];
        uint8_t *tag = t->tag;
        int64_t rows = t->rows, end = bounds[segment + 1], i = bounds[segment];
        if (at > i) i = at;
        at = 0;
        int64_t upto[SLOTS], low = INT64_MAX;
        for (int k = 0; k < n_open; k++) {
            upto[k] = atomic_load_explicit(&t->upto[slots[k]], memory_order_acquire);
            if (upto[k] < low) low = upto[k];
        }
        if (!rows) continue;
        if (low >= rows) { /* no snapshot needs this table: only mark */
            for (; i + AHEAD < end; i++) {
                __builtin_prefetch(tag + row_at(ids, wide, i + AHEAD, rows), 1);
                tag[row_at(ids, wide, i, rows)] = now;
            }
            for (; i < end; i++) tag[row_at(ids, wide, i, rows)] = now;
            continue;
        }
        for (; i < end; i++) {
            if (i + AHEAD < end) __builtin_prefetch(tag + row_at(ids, wide, i + AHEAD, rows), 1);
            if (i + 6 < end) { /* rows that will be saved are cold: fetch them, too */
                int64_t soon = row_at(ids, wide, i + 6, rows);
                if (tag[soon] != now && soon >= low) {
                    const char *line = t->part[0] + soon * t->width[0];
                    __builtin_prefetch(line), __builtin_prefetch(line + 64);
                    if (t->parts > 1) __builtin_prefetch(t->part[1] + soon * t->width[1]);
                }
            }
            int64_t row = row_at(ids, wide, i, rows);
            uint8_t before = tag[row];
            if (before == now) continue;
            for (int k = 0; k < n_open; k++) {
                if (before < p->open[slots[k]] && row >= upto[k]) {
                    if (!append(p, t, row, before)) {
                        p->stop_segment = segment, p->stop_at = i;
                        return 0;
                    }
                    break; /* one record serves every open snapshot */
                }
            }
            tag[row] = now;
        }
    }
    atomic_thread_fence(memory_order_release); /* a row is marked before it changes */
    return 1;
}

/* Copy memory that may vanish meanwhile: torch moves a storage in place when it is shared with
   another process or resized, and the caller holds no lock against that. The kernel reads it for
   us, and says so where nothing is mapped any more. 0: some of it wasn't there. Where the kernel
   isn't allowed to, plainly. */
int rows_read(char *to, const char *from, int64_t n) {
    while (n > 0) {
        struct iovec here = {to, (size_t)n}, there = {(void *)from, (size_t)n};
        ssize_t got = process_vm_readv(getpid(), &here, 1, &there, 1, 0);
        if (got <= 0) {
            if (got < 0 && errno != EFAULT) {
                memcpy(to, from, (size_t)n);
                return 1;
            }
            return 0;
        }
        to += got, from += got, n -= got;
    }
    return 1;
}

/* Copy rows [a, b), all of one chunk, as they were when the snapshot of `slot` opened. `out` has a
   destination for each component, or null for one that isn't wanted. Returns the records laid over,
   or -1 if the table's memory isn't there any more. */
int64_t rows_copy(pool_t *p, table_t *t, int64_t slot, int64_t a, int64_t b, char **out) {
    for (int64_t k = 0; k < t->parts; k++)
        if (out[k] && !rows_read(out[k], t->part[k] + a * t->width[k], (b - a) * t->width[k])) return -1;
    int64_t was = atomic_load(&t->upto[slot]); /* never back: the snapshot may have been given up */
    while (was < b && !atomic_compare_exchange_weak(&t->upto[slot], &was, b)) {}
    atomic_thread_fence(memory_order_seq_cst);
    int64_t mine = p->open[slot], laid = 0;
    int32_t most = (int32_t)(p->slab_bytes / t->record_bytes);
    int32_t slab = atomic_load_explicit(&t->first[chunk_of(t, a)], memory_order_acquire);
    for (; slab >= 0; slab = p->next[slab]) {
        int32_t n = atomic_load_explicit(&p->count[slab], memory_order_acquire);
        if (n > most) n = most;
        const char *record = p->slabs + (int64_t)slab * p->slab_bytes;
        for (int32_t i = 0; i < n; i++, record += t->record_bytes) {
            int64_t row;
            memcpy(&row, record, 8);
            /* Touched first after this snapshot opened: older records are of older snapshots. */
            if ((uint8_t)record[8] >= mine || (uint8_t)record[9] < mine || row < a || row >= b) continue;
            const char *from = record + HEAD;
            for (int64_t k = 0; k < t->parts; k++) {
                if (out[k]) memcpy(out[k] + (row - a) * t->width[k], from, t->width[k]);
                from += t->width[k];
            }
            laid++;
        }
    }
    return laid;
}

/* Give a chunk's slabs back. Only where no open snapshot needs them, by the thread that appends. */
int64_t rows_release(pool_t *p, table_t *t, int64_t chunk) {
    int64_t n = 0;
    int32_t slab = atomic_load_explicit(&t->first[chunk], memory_order_relaxed);
    atomic_store_explicit(&t->first[chunk], -1, memory_order_relaxed);
    for (; slab >= 0; n++) {
        int32_t older = p->next[slab];
        p->free_slabs[p->n_free++] = slab;
        slab = older;
    }
    return n;
}

/* Make all tags older by `by` epochs; those below become 0, "long ago". */
void rows_age(uint8_t *tag, int64_t rows, int by) {
    for (int64_t i = 0; i < rows; i++) tag[i] = tag[i] > by ? (uint8_t)(tag[i] - by) : 0;
}

#define ODD 0x9E3779B97F4A7C15ull
#define ODD2 0xD6E8FEB86659FD93ull
#define SOON 1024   /* bytes ahead that are fetched */

typedef struct {
    uint64_t a, b, c, d; /* chains: one alone would wait for each of its multiplications */
} hash_t;

static inline uint64_t mix(uint64_t x, uint64_t y) {
    unsigned __int128 r = (unsigned __int128)x * y;
    return (uint64_t)r ^ (uint64_t)(r >> 64);
}

static inline uint64_t word(const char *at) {
    uint64_t w;
    memcpy(&w, at, 8);
    return w;
}

static inline hash_t feed(hash_t h, const char *at, int64_t n) {
    for (; n >= 64; n -= 64, at += 64) {
        h.a = mix(word(at) ^ h.a, word(at + 8) ^ ODD);
        h.b = mix(word(at + 16) ^ h.b, word(at + 24) ^ ODD2);
        h.c = mix(word(at + 32) ^ h.c, word(at + 40) ^ ODD);
        h.d = mix(word(at + 48) ^ h.d, word(at + 56) ^ ODD2);
    }
    for (; n >= 16; n -= 16, at += 16) {
        uint64_t a = h.a;
        h.a = h.b, h.b = mix(word(at) ^ a, word(at + 8) ^ ODD);
    }
    if (n >= 8) {
        h.c = mix(word(at) ^ h.c, ODD2);
        n -= 8, at += 8;
    }
    if (n >= 4) {
        uint32_t half;
        memcpy(&half, at, 4);
        h.d = mix(half ^ h.d, ODD);
        n -= 4, at += 4;
    }
    for (; n; n--, at++) h.d = mix((uint8_t)*at ^ h.d, ODD2);
    return h;
}

/* The prints of `rows` rows, 16 bits each, over their bytes in every part that isn't null, compared
   with those in `prints` where tag[row] < since, and put there in any case. Returns how many differ;
   `found` has the first `most` of them. */
int64_t rows_print(uint16_t *prints, const uint8_t *tag, int since, int64_t rows, int64_t parts,
                   const char **part, const int64_t *width, int64_t *found, int64_t most) {
    int64_t differ = 0;
    atomic_thread_fence(memory_order_acquire);
    for (int64_t row = 0; row < rows; row++) {
        hash_t h = {ODD, ODD2, ODD * 3, ODD2 * 5};
        for (int64_t k = 0; k < parts; k++) {
            if (!part[k]) continue;
            const char *at = part[k] + row * width[k];
            __builtin_prefetch(at + SOON);
            h = feed(h, at, width[k]);
            h.d += (uint64_t)k;
        }
        uint16_t print = (uint16_t)(mix(mix(h.a ^ ODD, h.b ^ ODD2) ^ h.c, h.d ^ ODD) >> 48);
        if (tag[row] < since && prints[row] != print && differ++ < most) found[differ - 1] = row;
        prints[row] = print;
    }
    return differ;
}
