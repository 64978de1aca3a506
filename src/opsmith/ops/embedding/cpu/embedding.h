// Embedding: what the float and the quantized table share. Ids must be checked before anything is gathered.
#pragma once

#include "types.h"

namespace opsmith {

// ids [T]; table [V, n]; y [T, n].
int64_t first_bad_id(View ids, int64_t rows);  // the position of an id outside [0, rows), or -1
void embedding(View ids, View table, View y);
// zeroed: dtable is zero already.
void embedding_backward(View dy, View ids, int64_t padding_idx, bool zeroed, View dtable);

// The most used rows, dequantized, and the counts by which they were chosen. Any of them may be undefined.
struct RowCache {
  View slots;   // int32 [V]: where a row stands in `rows`; any other number where it does not
  View rows;    // [C, n] in y's dtype
  View counts;  // int32 [V]: how often each row was asked for
  View stats;   // int64 [2]: rows found in the cache, rows asked for
};

// table int8 [V, n]; scale float32 [V]; y[t] = table[ids[t]] * scale[ids[t]]. `ahead` tokens before a row is needed, the
// processor is asked to fetch it; the rows of next_ids are asked for at the end.
void quantized_embedding(View ids, View table, View scale, int64_t ahead, View next_ids,
                         const RowCache& cache, View y);

}  // namespace opsmith
