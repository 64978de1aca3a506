// Registers attention on caches in blocks, and what fills them. Lengths, blocks and slots are checked here too, before
// anything is read or written: a compiled graph has nobody else who would.
#include <cmath>

#include "attention/binding_attention.h"
#include "paged_attention/paged_attention.h"

namespace opsmith {
namespace {

// The caches, [blocks, block size, Hkv, D], for tensors in `dtype`; tables and lengths are not looked at.
PagedCache checked(const char* op, const Tensor& keys, const Tensor& values, const Optional& key_scale,
                   const Optional& value_scale, DType dtype, const Optional& table = {},
                   const Optional& lengths = {}) {
  const DType held = dtype_of(keys);
  const bool quantized = held == DType::i8;
  STD_TORCH_CHECK(is_floating(dtype) && (quantized || held == dtype), op,
                  ": caches are int8, or floating-point as what they are used with");
  const Heads k(op, keys, Layout::dense, held), v(op, values, Layout::dense, held);
  STD_TORCH_CHECK(k.like(v, 3), op, ": k_cache and v_cache do not fit each other");
  STD_TORCH_CHECK(bool(key_scale) == quantized && bool(value_scale) == quantized, op,
                  ": k_scale and v_scale belong to int8 caches");
  for (const Optional* scale : {&key_scale, &value_scale}) {
    STD_TORCH_CHECK(!*scale || (dtype_of(**scale) == DType::f32 && (*scale)->dim() == 3 &&
                                std::equal(k.sizes, k.sizes + 3, (*scale)->first_size)),
                    op, ": k_scale and v_scale must be float32 [blocks, block size, Hkv]");
  }
  return {view_of(keys),        view_of(values), view_of(key_scale),
          view_of(value_scale), view_of(table),  view_of(lengths)};
}

// Attention of queries [B, L, H, D] on a cache that was checked; `first` runs once the rest is known to be right.
template <class First>
void attend(const char* op, const Heads& q, const PagedCache& cache, const Optional& sinks,
            const Optional& alibi, std::optional<double> scale, int64_t window, double softcap,
            const Heads& out, First first) {
  const View &keys = cache.keys, &table = cache.table, &lengths = cache.lengths;
  const int64_t batch = q.sizes[0], size = cache.block_size();
  STD_TORCH_CHECK(q.like(out, 3), op, ": the output does not fit q");
  STD_TORCH_CHECK(q.sizes[3] == keys.sizes[3] && out.sizes[3] == cache.values.sizes[3], op,
                  ": head sizes of q and out are ", q.sizes[3], " and ", out.sizes[3],
                  ", those of the caches ", keys.sizes[3], " and ", cache.values.sizes[3]);
  check_groups(op, q.sizes[2], keys.sizes[2]);
  STD_TORCH_CHECK(table.dim == 2 && table.sizes[0] == batch && is_id(table.dtype), op,
                  ": block_tables must be int32 or int64 [", batch, ", blocks]");
  STD_TORCH_CHECK(lengths.dim == 1 && lengths.sizes[0] == batch && is_id(lengths.dtype), op,
                  ": seq_lens must be int32 or int64 [", batch, "]");
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = cache.length(b), most = table.sizes[1] * size;
    STD_TORCH_CHECK(0 <= length && length <= most, op, ": seq_lens must lie in [0, ", most, "], got ", length,
                    " for sequence ", b);
    if (length == 0) continue;
    for (int64_t i = first_visible(length, q.sizes[1], window) / size; i <= (length - 1) / size; ++i) {
      const int64_t block = cache.block(b, i);
      STD_TORCH_CHECK(0 <= block && block < keys.sizes[0], op, ": block_tables must lie in [0, ",
                      keys.sizes[0], "), got ", block, " for block ", i, " of sequence ", b);
    }
  }
  const double factor = scale ? *scale : 1 / std::sqrt(double(std::max<int64_t>(q.sizes[3], 1)));
  const AttentionOptions options{float(factor),
                                 true,
                                 window,
                                 float(softcap),
                                 of_heads(op, "sinks", sinks, q.sizes[2], q.view.dtype),
                                 of_heads(op, "alibi", alibi, q.sizes[2], q.view.dtype)};
  first();
  paged_attention(q.view, cache, options, out.view);
}

void paged_attention_op(const Tensor& q, const Tensor& keys, const Tensor& values, const Tensor& table,
                        const Tensor& lengths, const Optional& key_scale, const Optional& value_scale,
                        const Optional& sinks, const Optional& alibi, std::optional<double> scale,
                        int64_t window, double softcap, const Tensor& out) {
  const char* const op = "paged_attention";
  const DType dtype = dtype_of(q);
  const PagedCache cache = checked(op, keys, values, key_scale, value_scale, dtype, table, lengths);
  const Layout layout = q.dim() == 3 ? Layout::one_token : Layout::dense;
  attend(op, Heads(op, q, layout, dtype), cache, sinks, alibi, scale, window, softcap,
         Heads(op, out, layout, dtype), [] {});
}

// The slots [B * L] of rows [B, L, Hkv, D] in a cache that was checked.
View slots_of(const char* op, const Heads& k, const Heads& v, const Tensor& slots, const Tensor& keys,
              const Tensor& values) {
  const int64_t tokens = k.sizes[0] * k.sizes[1], slots_there = keys.size(0) * keys.size(1);
  STD_TORCH_CHECK(k.like(v, 3) && k.sizes[2] == keys.size(2) && k.sizes[3] == keys.size(3) &&
                      v.sizes[3] == values.size(3),
                  op, ": k and v do not fit the caches");
  STD_TORCH_CHECK(keys.data_ptr() != values.data_ptr() || !keys.numel(), op, ": one cache for k and v");
  STD_TORCH_CHECK(slots.dim() == 1 && slots.size(0) == tokens && is_id(dtype_of(slots)), op,
                  ": slot_mapping must be int32 or int64 [", tokens, "]");
  const View at = view_of(slots);
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t slot = integer_at(at, i * at.strides[0]);
    STD_TORCH_CHECK(-1 <= slot && slot < slots_there, op, ": slot_mapping must lie in [0, ", slots_there,
                    ") or be -1, got ", slot, " for token ", i, "; nothing was written");
  }
  return at;
}

void reshape_and_cache_op(const Tensor& k, const Tensor& v, const Tensor& slots, const Tensor& keys,
                          const Tensor& values, const Optional& key_scale, const Optional& value_scale) {
  const char* const op = "reshape_and_cache";
  const DType dtype = dtype_of(k);
  const PagedCache cache = checked(op, keys, values, key_scale, value_scale, dtype);
  const Heads given_k(op, k, Layout::one_token, dtype), given_v(op, v, Layout::one_token, dtype);
  reshape_and_cache(given_k.view, given_v.view, slots_of(op, given_k, given_v, slots, keys, values), cache);
}

// A layer's step of decoding: keys and values [B, Hkv, L, D] of new tokens into the cache, and attention on all there.
void paged_step_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& slots,
                   const Tensor& table, const Tensor& lengths, const Optional& sinks, double scale,
                   int64_t window, double softcap, const Tensor& out, const Tensor& keys,
                   const Tensor& values, const Optional& key_scale, const Optional& value_scale) {
  const char* const op = "paged_step";
  const DType dtype = dtype_of(q);
  const PagedCache cache = checked(op, keys, values, key_scale, value_scale, dtype, table, lengths);
  const Heads given_k(op, k, Layout::tokens_first, dtype), given_v(op, v, Layout::tokens_first, dtype);
  const View at = slots_of(op, given_k, given_v, slots, keys, values);
  attend(op, Heads(op, q, Layout::tokens_first, dtype), cache, sinks, {}, scale, window, softcap,
         Heads(op, out, Layout::dense, dtype),
         [&] { reshape_and_cache(given_k.view, given_v.view, at, cache); });
}

}  // namespace
}  // namespace opsmith

STABLE_TORCH_LIBRARY_IMPL(opsmith, CPU, m) {
  opsmith::offer(m, "paged_attention", opsmith::kernel<&opsmith::paged_attention_op>);
  opsmith::offer(m, "reshape_and_cache", opsmith::kernel<&opsmith::reshape_and_cache_op>);
  opsmith::offer(m, "paged_step", opsmith::kernel<&opsmith::paged_step_op>);
}
