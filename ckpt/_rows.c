/* The two hot loops of row guards: marking rows that are about to change, and copying a block
   of a table as it was when a snapshot opened. Loaded through ctypes by ckpt/native.py, whose
   structures mirror the ones here; ckpt/rows/torch_pool.py does the same in torch and is the
   reference for both.

   Memory order. Exactly one thread appends (under Python's lock), one at a time copies, and they
   meet without locks:
     touch: reads `upto`, appends the old row, publishes it (release), and only then returns, so
            that the row's change comes after.
     copy:  copies rows [a, b), publishes upto = b, fences, and only then reads what was appended.
   So a row that touch doesn't append has been copied before; and one that is appended after copy
   looked is changed only after it was copied. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

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
    return 1;
}

/* Copy rows [a, b), all of one chunk, as they were when the snapshot of `slot` opened. `out` has a
   destination for each component, or null for one that isn't wanted. Returns the records laid over. */
int64_t rows_copy(pool_t *p, table_t *t, int64_t slot, int64_t a, int64_t b, char **out) {
    for (int64_t k = 0; k < t->parts; k++)
        if (out[k]) memcpy(out[k], t->part[k] + a * t->width[k], (b - a) * t->width[k]);
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
