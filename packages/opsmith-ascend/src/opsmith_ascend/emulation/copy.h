// Copies between the memories. Local memory moves in data blocks of 32 bytes: DataCopy in whole ones, DataCopyPad with
// a row of any length, whose last data block it fills up on the way in and cuts on the way out.
#pragma once

#include "queue.h"

namespace AscendC {

// Fields are wider than a board's, so that a value that does not fit is seen: give computed values as they are.
struct DataCopyParams {
  int64_t blockCount = 1, blockLen = 0, srcStride = 0, dstStride = 0;  // lengths and gaps in data blocks
  DataCopyParams() = default;
  DataCopyParams(int64_t count, int64_t len, int64_t src, int64_t dst)
      : blockCount(count), blockLen(len), srcStride(src), dstStride(dst) {}
};

struct DataCopyExtParams {
  int64_t blockCount = 1, blockLen = 0;  // rows; bytes of each
  int64_t srcStride = 0, dstStride = 0;  // gaps behind a row: bytes in global memory, blocks in local memory
  int64_t rsv = 0;
  DataCopyExtParams() = default;
  DataCopyExtParams(int64_t count, int64_t len, int64_t src, int64_t dst, int64_t reserved)
      : blockCount(count), blockLen(len), srcStride(src), dstStride(dst), rsv(reserved) {}
};

template <class T>
struct DataCopyPadExtParams {
  bool isPad = false;
  int64_t leftPadding = 0, rightPadding = 0;  // elements, at most a data block together
  T paddingValue{};
  DataCopyPadExtParams() = default;
  DataCopyPadExtParams(bool pad, int64_t left, int64_t right, T value)
      : isPad(pad), leftPadding(left), rightPadding(right), paddingValue(value) {}
};

namespace emulation {

void within(const char* field, int64_t value, int64_t low, int64_t high);
void count_copy(const Buffer* buffer, uint64_t in, uint64_t out);

template <class T>
void begin_copy(pipe_t pipe, const char* name, Here here, const LocalTensor<T>& local, int64_t count) {
  core().begin(pipe, name, here);
  local.aligned("the local tensor");
  within("blockCount", count, 1, 4095);
}

constexpr int64_t padded(int64_t bytes) { return (bytes + kDataBlock - 1) / kDataBlock * kDataBlock; }

}  // namespace emulation

namespace emulation {

void check_copy(const DataCopyParams& params, int64_t odd);

template <class T>
void copy_in(Here here, const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params,
             int64_t odd = 0) {
  begin_copy(PIPE_MTE2, "DataCopy", here, dst, params.blockCount);
  check_copy(params, odd);
  const int64_t bytes = params.blockLen * kDataBlock;
  for (int64_t row = 0; row < params.blockCount; ++row) {
    const auto* from = reinterpret_cast<const uint8_t*>(src.raw()) +
                       row * (bytes + params.srcStride * kDataBlock);
    core().read_global(from, bytes);
    std::memcpy(dst.write(row * (bytes + params.dstStride * kDataBlock), bytes), from, bytes);
  }
  count_copy(dst.buffer(), bytes * params.blockCount, 0);
}

template <class T>
void copy_out(Here here, const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
              int64_t odd = 0) {
  begin_copy(PIPE_MTE3, "DataCopy", here, src, params.blockCount);
  check_copy(params, odd);
  const int64_t bytes = params.blockLen * kDataBlock;
  for (int64_t row = 0; row < params.blockCount; ++row)
    core().write_global(reinterpret_cast<uint8_t*>(dst.raw()) + row * (bytes + params.dstStride * kDataBlock),
                        src.read(row * (bytes + params.srcStride * kDataBlock), bytes), bytes);
  count_copy(src.buffer(), 0, bytes * params.blockCount);
}

// The bytes, where they do not fill whole data blocks.
constexpr int64_t odd_bytes(int64_t bytes) { return bytes % kDataBlock ? bytes : 0; }

}  // namespace emulation

template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyParams& params,
              Here here = Here::now()) {
  emulation::copy_in(here, dst, src, params);
}
template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyParams& params,
              Here here = Here::now()) {
  emulation::copy_out(here, dst, src, params);
}
template <class T>
void DataCopy(const LocalTensor<T>& dst, const GlobalTensor<T>& src, uint32_t count,
              Here here = Here::now()) {
  const int64_t bytes = int64_t(count) * sizeof(T);
  emulation::copy_in(here, dst, src, DataCopyParams(1, bytes / 32, 0, 0), emulation::odd_bytes(bytes));
}
template <class T>
void DataCopy(const GlobalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count,
              Here here = Here::now()) {
  const int64_t bytes = int64_t(count) * sizeof(T);
  emulation::copy_out(here, dst, src, DataCopyParams(1, bytes / 32, 0, 0), emulation::odd_bytes(bytes));
}

// Within local memory the vector pipe copies.
template <class T>
void DataCopy(const LocalTensor<T>& dst, const LocalTensor<T>& src, uint32_t count, Here here = Here::now()) {
  using namespace emulation;
  const int64_t bytes = int64_t(count) * sizeof(T);
  core().begin(PIPE_V, "DataCopy", here);
  check_copy(DataCopyParams(1, padded(bytes) / kDataBlock, 0, 0), odd_bytes(bytes));
  dst.aligned("dst"), src.aligned("src");
  const uint8_t* from = src.read(0, bytes);
  std::memmove(dst.write(0, bytes), from, bytes);
  core().spend(kVectorStart + double(bytes) / kRepeatBytes);
}

template <class T>
void DataCopyPad(const LocalTensor<T>& dst, const GlobalTensor<T>& src, const DataCopyExtParams& params,
                 const DataCopyPadExtParams<T>& pad, Here here = Here::now()) {
  using namespace emulation;
  begin_copy(PIPE_MTE2, "DataCopyPad", here, dst, params.blockCount);
  within("blockLen", params.blockLen, 1, 2097151);
  within("srcStride", params.srcStride, 0, 4294967295);
  within("dstStride", params.dstStride, 0, 65535);
  const int64_t size = sizeof(T), left = pad.isPad ? pad.leftPadding * size : 0;
  const int64_t right = pad.isPad ? pad.rightPadding * size : 0;
  within("leftPadding in bytes", left, 0, kDataBlock);
  within("rightPadding in bytes", right, 0, kDataBlock);
  const int64_t filled = left + params.blockLen + right, taken = padded(filled);
  for (int64_t row = 0; row < params.blockCount; ++row) {
    const auto* from = reinterpret_cast<const uint8_t*>(src.raw()) +
                       row * (params.blockLen + params.srcStride);
    core().read_global(from, params.blockLen);
    const int64_t at = row * (taken + params.dstStride * kDataBlock);
    uint8_t* to = dst.write(at, filled);
    for (int64_t i = 0; i < left; i += size) std::memcpy(to + i, &pad.paddingValue, size);
    std::memcpy(to + left, from, params.blockLen);
    for (int64_t i = left + params.blockLen; i < filled; i += size)
      std::memcpy(to + i, &pad.paddingValue, size);
    if (taken > filled) dst.spoil(at + filled, taken - filled);
  }
  count_copy(dst.buffer(), params.blockLen * params.blockCount, 0);
}

template <class T>
void DataCopyPad(const GlobalTensor<T>& dst, const LocalTensor<T>& src, const DataCopyExtParams& params,
                 Here here = Here::now()) {
  using namespace emulation;
  begin_copy(PIPE_MTE3, "DataCopyPad", here, src, params.blockCount);
  within("blockLen", params.blockLen, 1, 2097151);
  within("srcStride", params.srcStride, 0, 65535);
  within("dstStride", params.dstStride, 0, 4294967295);
  const int64_t step = padded(params.blockLen) + params.srcStride * kDataBlock;
  for (int64_t row = 0; row < params.blockCount; ++row)
    core().write_global(reinterpret_cast<uint8_t*>(dst.raw()) + row * (params.blockLen + params.dstStride),
                        src.read(row * step, params.blockLen), params.blockLen);
  count_copy(src.buffer(), 0, params.blockLen * params.blockCount);
}

}  // namespace AscendC
