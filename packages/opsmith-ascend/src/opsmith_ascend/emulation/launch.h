// The host's side: give a kernel its tensors, run its blocks one after the other, report what they did.
#pragma once

#include <utility>

#include "ascend_emulation.h"

namespace AscendC::emulation {

// A tensor of the launch, as the harness passes it: see harness.py.
struct Argument {
  const char* name;
  void* data;       // null for an optional tensor that is not given
  uint64_t bytes;
  int32_t readable, writable;
};

template <size_t... I>
void call(void (*kernel)(decltype((void)I, GM_ADDR())...), GM_ADDR* arguments, std::index_sequence<I...>) {
  kernel(arguments[I]...);
}

// Everything of the report is JSON: a fault, or counts and estimates.
std::string report(const Fault* fault, int blocks, const double (&worst)[kPipes]);

// Runs `blocks` blocks of a kernel. `arguments` are its tensors in order, the workspace last; the tiling follows them.
template <size_t parameters, class Kernel>
const char* launch(Kernel kernel, const Argument* arguments, int blocks, const void* tiling) {
  static std::string text;
  Core& c = core();
  c.reset();
  GM_ADDR addresses[parameters] = {};
  for (size_t i = 0; i + 1 < parameters; ++i) {
    const Argument& a = arguments[i];
    addresses[i] = static_cast<GM_ADDR>(a.data);
    if (a.data && a.bytes) c.add_region(a.name, addresses[i], a.bytes, a.readable, a.writable);
  }
  addresses[parameters - 1] = const_cast<GM_ADDR>(static_cast<const uint8_t*>(tiling));
  c.blocks = blocks;
  double worst[kPipes] = {};
  try {
    for (int block = 0; block < blocks; ++block) {
      c.start_block(block);
      call(kernel, addresses, std::make_index_sequence<parameters>());
      c.end_block();
      for (int p = 0; p < kPipes; ++p) worst[p] = worst[p] < c.cycles[p] ? c.cycles[p] : worst[p];
    }
    text = report(nullptr, blocks, worst);
  } catch (const Fault& fault) {
    text = report(&fault, blocks, worst);
  }
  return text.c_str();
}

// Calls a tiling function with numbers in the order of its parameters; what it takes last is the platform.
template <class Data, class Platform, class... A, size_t... I>
Data tile(Data (*function)(A...), const double* numbers, const Platform& platform,
          std::index_sequence<I...>) {
  using Parameters = std::tuple<A...>;
  return function(std::tuple_element_t<I, Parameters>(numbers[I])..., platform);
}

}  // namespace AscendC::emulation

#define OPSMITH_EXPORT extern "C" __attribute__((visibility("default")))

// The functions that the harness calls, for a kernel and the function that computes its tiling.
#define OPSMITH_KERNEL(kernel, parameters)                                                             \
  OPSMITH_EXPORT const char* opsmith_launch(const AscendC::emulation::Argument* arguments, int blocks, \
                                            const void* tiling) {                                      \
    return AscendC::emulation::launch<parameters>(kernel, arguments, blocks, tiling);                  \
  }

#define OPSMITH_TILING(function)                                                                       \
  template <class Data, class... A>                                                                    \
  int opsmith_tile(Data (*f)(A...), const double* numbers, int count, int cores, int local, void* out, \
                   int room) {                                                                         \
    if (count != int(sizeof...(A)) - 1 || int(sizeof(Data)) > room) return -int(sizeof...(A));         \
    const opsmith::Platform platform{uint32_t(cores), uint32_t(local)};                                \
    const Data data = AscendC::emulation::tile(f, numbers, platform,                                   \
                                               std::make_index_sequence<sizeof...(A) - 1>());          \
    std::memcpy(out, &data, sizeof data);                                                              \
    return int(data.blocks);                                                                           \
  }                                                                                                    \
  OPSMITH_EXPORT int opsmith_tiling(const double* numbers, int count, int cores, int local, void* out, \
                                    int room) {                                                        \
    return opsmith_tile(&function, numbers, count, cores, local, out, room);                           \
  }
