// Registers the embeddings. Ids are checked here: kernels read, and count, wherever an id points.
#include "binding.h"
#include "embedding.h"

namespace opsmith {
namespace {

// Ids of any dimensions as [T], each of them a row of a table of `rows`.
Line ids_of(const char* op, const Tensor& t, int64_t rows) {
  const Line ids(op, "ids", t);
  STD_TORCH_CHECK(is_id(ids.dtype()), op, ": ids must be int32 or int64");
  const View v = ids.view();
  const int64_t at = first_bad_id(v, rows);
  STD_TORCH_CHECK(at < 0, op, ": ids must lie in [0, ", rows, "), the rows of the table; got ",
                  integer_at(v, at * v.strides[0]), " at position ", at);
  return ids;
}

// A tensor of any dimensions as so many rows of n.
Rows rows_of(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t n) {
  const Rows all(op, name, t);
  STD_TORCH_CHECK(all.rows() == rows && all.n() == n, op, ": ", name, " must hold ", rows, " rows of ", n);
  return all;
}

void embedding_op(Tensor ids, Tensor table, Tensor y) {
  const char* op = "embedding";
  const Line id = ids_of(op, ids, table.size(0));
  const int64_t n = table.size(1);
  const Rows out = rows_of(op, "y", y, id.size(), n);
  const DType dtype = dtype_of(table);
  STD_TORCH_CHECK(is_floating(dtype), op, ": table must be floating-point");
  STD_TORCH_CHECK(out.view().dtype == dtype, op, ": y must have the table's dtype");
  embedding(id.view(), rows_of(op, "table", table, table.size(0), n).view(), out.view());
}

void embedding_backward_op(Tensor dy, Tensor ids, int64_t padding_idx, bool zeroed, Tensor dtable) {
  const char* op = "embedding_backward";
  const Line id = ids_of(op, ids, dtable.size(0));
  const int64_t n = dtable.size(1);
  const Rows dout = rows_of(op, "dy", dy, id.size(), n);
  STD_TORCH_CHECK(dout.view().dtype == dtype_of(dtable), op, ": dy must have the table's dtype");
  embedding_backward(dout.view(), id.view(), padding_idx, zeroed,
                     rows_of(op, "dtable", dtable, dtable.size(0), n).view());
}

void quantized_embedding_op(Tensor ids, Tensor table, Tensor scale, int64_t ahead, Optional next_ids,
                            Optional slots, Optional rows, Optional counts, Optional stats, Tensor y) {
  const char* op = "quantized_embedding";
  const int64_t v = table.size(0), n = table.size(1);
  const Line id = ids_of(op, ids, v);
  std::optional<Line> next;
  if (next_ids) next = ids_of(op, *next_ids, v);
  const Rows quantized = rows_of(op, "table", table, v, n), out = rows_of(op, "y", y, id.size(), n);
  STD_TORCH_CHECK(quantized.view().dtype == DType::i8, op, ": table must be int8");
  const DType to = out.view().dtype;
  STD_TORCH_CHECK(is_floating(to), op, ": y must be float32, bfloat16 or float16");
  STD_TORCH_CHECK(scale.numel() == v && dtype_of(scale) == DType::f32 && scale.dim() == 1, op,
                  ": scale must be float32 [", v, "]");
  RowCache cache{view_of(slots), view_of(rows), view_of(counts), view_of(stats)};
  auto flat = [&](const View& t, const char* name, DType dtype, int64_t size) {
    STD_TORCH_CHECK(
        !t.defined() || (t.dtype == dtype && t.dim == 1 && t.sizes[0] == size && t.strides[0] == 1), op, ": ",
        name, " must be a contiguous vector of ", size);
  };
  flat(cache.slots, "slots", DType::i32, v);
  flat(cache.counts, "counts", DType::i32, v);
  flat(cache.stats, "stats", DType::i64, 2);
  STD_TORCH_CHECK(cache.slots.defined() == cache.rows.defined(), op, ": slots and rows come together");
  if (cache.rows.defined()) {
    const View& r = cache.rows;
    STD_TORCH_CHECK(r.dtype == to && r.dim == 2 && r.sizes[1] == n && r.strides[1] == 1, op,
                    ": cached rows must be like y's");
  }
  quantized_embedding(id.view(), quantized.view(), view_of(scale), ahead, next ? next->view() : View{}, cache,
                      out.view());
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  using namespace opsmith;
  offer(m, "embedding", opsmith::kernel<&embedding_op>);
  offer(m, "embedding_backward", opsmith::kernel<&embedding_backward_op>);
  offer(m, "quantized_embedding", opsmith::kernel<&quantized_embedding_op>);
}
