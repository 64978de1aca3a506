// One vector core: its pipes, the order between them, and what each byte of memory remembers. core.cpp is compiled once for
// all kernels.
#pragma once

#include <deque>
#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "types.h"

namespace AscendC::emulation {

// Where an instruction stands in the kernel: every instruction takes one as its last argument and nobody passes it.
struct Here {
  const char* file;
  int line;
  static constexpr Here now(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
};

// One place in the source that issues one instruction, with what it has done so far.
struct Instruction {
  const char* name;
  Here here;
  pipe_t pipe;
  uint64_t issued = 0;
};

struct Fault {
  std::string text, file, instruction;
  int line;
};

constexpr int kPipes = 4;
constexpr const char* kPipeNames[kPipes] = {"S", "V", "MTE2", "MTE3"};
constexpr uint32_t kDataBlock = 32;  // bytes: the unit of addresses and strides in local memory
constexpr uint32_t kRepeatBytes = 256;  // what a vector instruction does in one repeat
constexpr int kMaxRepeats = 255;
constexpr int kKinds = 16, kEvents = 8;  // from each pipe to each; of each kind
constexpr uint32_t kLocalMemory = 192 * 1024;

// Estimates only. Assumed: a repeat a cycle behind a start of 16; 1.6 TB/s over 48 vector cores at 1.8 GHz, which is
// 18 bytes a cycle for each, behind a start of 64; 16 cycles for a scalar that waits for memory.
constexpr double kVectorStart = 16, kCopyStart = 64, kCopyBytes = 18, kScalarCycles = 16;

std::string event_name(int kind);

// How far each pipe has come, as somebody knows it.
struct Clock {
  uint32_t at[kPipes] = {};
  void merge(const Clock& other) {
    for (int p = 0; p < kPipes; ++p) at[p] = at[p] < other.at[p] ? other.at[p] : at[p];
  }
};

// What 32 bytes of memory remember.
struct Block {
  uint32_t written = 0;  // one bit a byte: somebody wrote it
  uint32_t write_time = 0, read_time[kPipes] = {};
  const Instruction* writer = nullptr;
  const Instruction* reader[kPipes] = {};
  int block = -1;  // of the launch, to whose clocks the times belong
};

// A tensor in global memory: one argument of the kernel.
struct Region {
  std::string name;
  uint8_t* begin;
  uint64_t bytes;
  bool readable, writable;  // readable: its values were there before the kernel ran
  std::vector<Block> blocks;
  std::vector<int16_t> owner;  // of each byte: the block of the launch that wrote it, or -1
  uint64_t read = 0, wrote = 0;
};

// A piece of local memory that a queue lends, with what it takes to see it used at the wrong time.
struct Buffer {
  enum State { kIdle, kAllocated, kQueued, kTaken, kForGood } state = kIdle;
  uint32_t address = 0, bytes = 0;
  uint32_t generation = 0;  // counts how often it was lent
  std::string owner;  // "VECIN 0": position, and number in the order of InitBuffer
  Clock enqueued, freed;
  Here allocated{};
};

// What SetFlag leaves for WaitFlag.
struct Flag {
  bool set = false;
  Clock stamp;
  Here here{};
};

class Core {
 public:
  int block = 0, blocks = 1;
  std::vector<uint8_t> local = std::vector<uint8_t>(kLocalMemory);
  std::vector<Region> regions;
  std::map<std::string, std::pair<uint64_t, uint64_t>> queues;  // bytes in and out, by the queue's name
  double cycles[kPipes] = {};  // of this block, estimated
  std::deque<Buffer> buffers;
  uint32_t local_used = 0, local_peak = 0;
  Flag flags[kKinds][kEvents];
  bool taken[kKinds][kEvents] = {};  // by AllocEventID
  int queued[kKinds] = {};  // buffers of queues, each of which takes an event of this kind
  std::map<std::tuple<const char*, const char*, int>, Instruction> instructions;

  // Before a launch: forget the one before.
  void reset();
  void add_region(const char* name, uint8_t* begin, uint64_t bytes, bool readable, bool writable);

  void start_block(int index);
  // What a kernel must not leave behind: the next one would find it.
  void end_block();

  // Issue an instruction. What S has waited for came before all that it issues from then on; what S itself has
  // stored is in order with the other pipes only after an event.
  void begin(pipe_t pipe, const char* name, Here here);
  void spend(double amount) { cycles[current_->pipe] += amount; }

  Clock stamp(pipe_t pipe) const { return clocks_[pipe]; }
  void wait(pipe_t pipe, const Clock& stamp) { clocks_[pipe].merge(stamp); }
  void barrier();

  [[noreturn]] __attribute__((format(printf, 2, 3))) void fault(const char* format, ...) const;

  // The current instruction reads or writes bytes of local memory. The caller has checked that they exist.
  void read_local(uint32_t address, uint32_t bytes);
  void write_local(uint32_t address, uint32_t bytes);
  // Bytes whose content nobody promises, as the rest of a data block behind a copy without padding.
  void spoil_local(uint32_t address, uint32_t bytes);

  void read_global(const uint8_t* address, uint64_t bytes);
  void write_global(uint8_t* address, const uint8_t* values, uint64_t bytes);

 private:
  Clock clocks_[kPipes];
  Instruction* current_ = nullptr;
  std::vector<Block> memory_;

  template <class Visit>
  void each(std::vector<Block>& memory, uint64_t address, uint64_t bytes, Visit visit);
  void own(Block& b) const;
  void read_block(Block& b);
  void write_block(Block& b);
  [[noreturn]] void race(const char* does, const char* did, const Instruction* other) const;
  [[noreturn]] void fault_unwritten(const char* memory, uint64_t at, uint64_t bytes) const;
  Region& find(const uint8_t* address, uint64_t bytes, const char* does);
};

// The core that runs now: blocks run one after the other.
Core& core();

template <class Data>
Data read_tiling(const uint8_t* address) {
  Data data;
  std::memcpy(&data, address, sizeof data);
  return data;
}

}  // namespace AscendC::emulation

namespace AscendC {

using emulation::Here;

inline int64_t GetBlockIdx() { return emulation::core().block; }
inline int64_t GetBlockNum() { return emulation::core().blocks; }

}  // namespace AscendC
