// Registers the embeddings. Ids are checked here: kernels read, and count, wherever an id points.
#include "binding.h"
#include "embedding.h"

namespace opsmith {
namespace {

using Optional = std::optional<Tensor>;

// A tensor of any dimensions as [rows, n]; it must be contiguous, or have two dimensions and contiguous rows.
class Matrix {
 public:
  Matrix(const char* op, const char* name, const Tensor& t, int64_t rows, int64_t n)
      : data_(t.data_ptr()), dtype_(dtype_of(t)), sizes_{rows, n}, strides_{n, 1} {
    if (t.dim() == 2 && (n < 2 || t.stride(1) == 1)) {
      strides_[0] = t.stride(0);
    } else {
      STD_TORCH_CHECK(t.is_contiguous(), op, ": ", name, " must be contiguous, or have contiguous rows");
    }
    STD_TORCH_CHECK(t.numel() == rows * n, op, ": ", name, " must hold ", rows, " rows of ", n);
  }
  View view() const { return View{data_, dtype_, 2, sizes_, strides_}; }

 private:
  void* data_;
  DType dtype_;
  int64_t sizes_[2], strides_[2];
};

// Ids of any dimensions as [T], each of them a row of a table of `rows`.
class Ids {
 public:
  Ids(const char* op, const Tensor& t, int64_t rows)
      : data_(t.data_ptr()), dtype_(dtype_of(t)), size_(t.numel()), stride_(t.dim() == 1 ? t.stride(0) : 1) {
    STD_TORCH_CHECK(dtype_ == DType::i32 || dtype_ == DType::i64, op, ": ids must be int32 or int64");
    STD_TORCH_CHECK(t.dim() == 1 || t.is_contiguous(), op, ": ids must be contiguous, or a vector");
    const int64_t at = first_bad_id(view(), rows);
    STD_TORCH_CHECK(at < 0, op, ": ids must lie in [0, ", rows, "), the rows of the table; got ",
                    dtype_ == DType::i32 ? int64_t(view().as<int32_t>()[at * stride_])
                                         : view().as<int64_t>()[at * stride_],
                    " at position ", at);
  }
  int64_t size() const { return size_; }
  View view() const { return View{data_, dtype_, 1, &size_, &stride_}; }

 private:
  void* data_;
  DType dtype_;
  int64_t size_, stride_;
};

void embedding_op(Tensor ids, Tensor table, Tensor y) {
  const char* op = "embedding";
  const Ids id(op, ids, table.size(0));
  const int64_t n = table.size(1);
  const Matrix out(op, "y", y, id.size(), n);
  const DType dtype = dtype_of(table);
  STD_TORCH_CHECK(dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f16, op,
                  ": table must be floating-point");
  STD_TORCH_CHECK(out.view().dtype == dtype, op, ": y must have the table's dtype");
  embedding(id.view(), Matrix(op, "table", table, table.size(0), n).view(), out.view());
}

void embedding_backward_op(Tensor dy, Tensor ids, int64_t padding_idx, bool zeroed, Tensor dtable) {
  const char* op = "embedding_backward";
  const Ids id(op, ids, dtable.size(0));
  const int64_t n = dtable.size(1);
  const Matrix dout(op, "dy", dy, id.size(), n);
  STD_TORCH_CHECK(dout.view().dtype == dtype_of(dtable), op, ": dy must have the table's dtype");
  embedding_backward(dout.view(), id.view(), padding_idx, zeroed,
                     Matrix(op, "dtable", dtable, dtable.size(0), n).view());
}

void quantized_embedding_op(Tensor ids, Tensor table, Tensor scale, int64_t ahead, Optional next_ids,
                            Optional slots, Optional rows, Optional counts, Optional stats, Tensor y) {
  const char* op = "quantized_embedding";
  const int64_t v = table.size(0), n = table.size(1);
  const Ids id(op, ids, v);
  std::optional<Ids> next;
  if (next_ids) next.emplace(op, *next_ids, v);
  const Matrix quantized(op, "table", table, v, n), out(op, "y", y, id.size(), n);
  STD_TORCH_CHECK(quantized.view().dtype == DType::i8, op, ": table must be int8");
  const DType to = out.view().dtype;
  STD_TORCH_CHECK(to == DType::f32 || to == DType::bf16 || to == DType::f16, op,
                  ": y must be float32, bfloat16 or float16");
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
