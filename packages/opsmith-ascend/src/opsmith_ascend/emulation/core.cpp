// What the headers declare and no kernel changes.
#include "launch.h"

#include <cstdarg>
#include <cstdio>

namespace AscendC::emulation {

std::string event_name(int kind) { return std::string(kPipeNames[kind / 4]) + "_" + kPipeNames[kind % 4]; }

void Core::reset() {
  regions.clear();
  queues.clear();
  instructions.clear();
  current_ = nullptr;
  local_peak = 0;
}

void Core::add_region(const char* name, uint8_t* begin, uint64_t bytes, bool readable, bool writable) {
  for (Region& r : regions)
    if (r.begin == begin) {  // an input that is written in place: one memory under two names
      r.readable |= readable, r.writable |= writable;
      if (r.writable) r.owner.assign(r.bytes, -1), r.blocks.assign(r.bytes / kDataBlock + 1, Block());
      return;
    }
  Region r{name, begin, bytes, readable, writable, {}, {}};
  if (writable) r.owner.assign(bytes, -1), r.blocks.assign(bytes / kDataBlock + 1, Block());
  regions.push_back(std::move(r));
}

void Core::start_block(int index) {
  block = index;
  current_ = nullptr;
  memory_.assign(kLocalMemory / kDataBlock, Block());
  std::memset(local.data(), 0xff, local.size());
  for (Clock& clock : clocks_) clock = Clock();
  for (double& c : cycles) c = 0;
  buffers.clear();
  local_used = 0;
  for (int kind = 0; kind < kKinds; ++kind) {
    queued[kind] = 0;
    for (int id = 0; id < kEvents; ++id) flags[kind][id] = Flag(), taken[kind][id] = false;
  }
}

void Core::end_block() {
  for (const Buffer& b : buffers) {
    if (b.state == Buffer::kIdle || b.state == Buffer::kForGood) continue;
    begin(PIPE_S, "AllocTensor", b.allocated);
    fault("the kernel ends, and a tensor of %s was %s", b.owner.c_str(),
          b.state == Buffer::kQueued ? "never taken out: DeQue is missing"
                                     : "never given back: FreeTensor is missing");
  }
  for (int kind = 0; kind < kKinds; ++kind)
    for (const Flag& flag : flags[kind]) {
      if (!flag.set) continue;
      begin(PIPE_S, "SetFlag", flag.here);
      fault("the kernel ends, and nobody has waited for event %s: the next kernel would find it set",
            event_name(kind).c_str());
    }
}

void Core::begin(pipe_t pipe, const char* name, Here here) {
  auto found = instructions.try_emplace({name, here.file, here.line}, Instruction{name, here, pipe});
  current_ = &found.first->second;
  ++current_->issued;
  const uint32_t stored = clocks_[pipe].at[PIPE_S];
  clocks_[pipe].merge(clocks_[PIPE_S]);
  if (pipe != PIPE_S) clocks_[pipe].at[PIPE_S] = stored;
  ++clocks_[pipe].at[pipe];
}

template <class Visit>
void Core::each(std::vector<Block>& memory, uint64_t address, uint64_t bytes, Visit visit) {
  const uint64_t end = address + bytes;
  while (address < end) {
    const uint64_t index = address / kDataBlock, first = address % kDataBlock;
    const uint64_t n = end - address < kDataBlock - first ? end - address : kDataBlock - first;
    const uint32_t mask = n == kDataBlock ? ~0u : ((1u << n) - 1u) << first;
    visit(memory[index], mask, address);
    address += n;
  }
}

void Core::own(Block& b) const {
  if (b.block == block) return;
  const uint32_t written = b.written;
  b = Block();
  b.written = written;
  b.block = block;
}

void Core::read_block(Block& b) {
  own(b);
  const pipe_t pipe = current_->pipe;
  if (b.writer && clocks_[pipe].at[b.writer->pipe] < b.write_time) race("reads", "wrote", b.writer);
  // A scalar is in its register before the program goes on.
  if (pipe == PIPE_S) return;
  b.read_time[pipe] = clocks_[pipe].at[pipe];
  b.reader[pipe] = current_;
}

void Core::write_block(Block& b) {
  own(b);
  const pipe_t pipe = current_->pipe;
  if (b.writer && clocks_[pipe].at[b.writer->pipe] < b.write_time) race("writes", "wrote", b.writer);
  for (int p = 0; p < kPipes; ++p)
    if (b.reader[p] && clocks_[pipe].at[p] < b.read_time[p]) race("writes", "reads", b.reader[p]);
  b.write_time = clocks_[pipe].at[pipe];
  b.writer = current_;
}

void Core::race(const char* does, const char* did, const Instruction* other) const {
  const char *from = kPipeNames[other->pipe], *to = kPipeNames[current_->pipe];
  fault(
      "%s what %s (line %d, pipe %s) %s, and no event orders pipe %s behind pipe %s: pass the tensor through "
      "its queue (EnQue, DeQue; FreeTensor before it is allocated again), or SetFlag and WaitFlag "
      "<HardEvent::%s_%s>",
      does, other->name, other->here.line, from, did, to, from, from, to);
}

void Core::fault_unwritten(const char* memory, uint64_t at, uint64_t bytes) const {
  fault("reads %llu bytes at %llu of %s, and nobody has written all of them", (unsigned long long)bytes,
        (unsigned long long)at, memory);
}

Region& Core::find(const uint8_t* address, uint64_t bytes, const char* does) {
  Region* near = nullptr;
  for (Region& region : regions) {
    const bool inside = address >= region.begin && address < region.begin + region.bytes;
    if (inside && address + bytes <= region.begin + region.bytes) return region;
    if (inside || (!near && address == region.begin + region.bytes)) near = &region;
  }
  if (near)
    fault("%s %llu bytes at byte %lld of %s, which has %llu: outside the tensor", does,
          (unsigned long long)bytes, (long long)(address - near->begin), near->name.c_str(),
          (unsigned long long)near->bytes);
  fault("%s %llu bytes of global memory outside every tensor of the kernel", does, (unsigned long long)bytes);
}

void Core::barrier() {
  Clock all;
  for (const Clock& clock : clocks_) all.merge(clock);
  for (Clock& clock : clocks_) clock = all;
}

void Core::fault(const char* format, ...) const {
  char text[600];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  if (!current_) throw Fault{text, "", "", 0};
  throw Fault{text, current_->here.file, current_->name, current_->here.line};
}

void Core::read_local(uint32_t address, uint32_t bytes) {
  each(memory_, address, bytes, [&](Block& b, uint32_t mask, uint64_t) {
    if ((b.written & mask) != mask) fault_unwritten("local memory", address, bytes);
    read_block(b);
  });
}

void Core::write_local(uint32_t address, uint32_t bytes) {
  each(memory_, address, bytes, [&](Block& b, uint32_t mask, uint64_t) {
    write_block(b);
    b.written |= mask;
  });
}

void Core::spoil_local(uint32_t address, uint32_t bytes) {
  each(memory_, address, bytes, [&](Block& b, uint32_t mask, uint64_t) {
    write_block(b);
    b.written &= ~mask;
  });
}

void Core::read_global(const uint8_t* address, uint64_t bytes) {
  Region& region = find(address, bytes, "reads");
  const uint64_t offset = address - region.begin;
  region.read += bytes;
  if (!region.writable) return;
  for (uint64_t i = offset; i < offset + bytes; ++i) {
    if (region.owner[i] < 0 && !region.readable) fault_unwritten(region.name.c_str(), offset, bytes);
    if (region.owner[i] >= 0 && region.owner[i] != block)
      fault(
          "reads byte %llu of %s, which block %d writes; blocks run in any order: leave it to another "
          "launch, or to the block that writes it",
          (unsigned long long)i, region.name.c_str(), int(region.owner[i]));
  }
  each(region.blocks, offset, bytes, [&](Block& b, uint32_t, uint64_t) { read_block(b); });
}

void Core::write_global(uint8_t* address, const uint8_t* values, uint64_t bytes) {
  Region& region = find(address, bytes, "writes");
  const uint64_t offset = address - region.begin;
  region.wrote += bytes;
  if (!region.writable)
    fault("writes %llu bytes to %s, which is an input", (unsigned long long)bytes, region.name.c_str());
  for (uint64_t i = 0; i < bytes; ++i) {
    int16_t& owner = region.owner[offset + i];
    if (owner >= 0 && owner != block && address[i] != values[i])
      fault(
          "writes byte %llu of %s, to which block %d has given another value; blocks run in any order: "
          "give every byte to one of them",
          (unsigned long long)(offset + i), region.name.c_str(), int(owner));
    owner = int16_t(block);
  }
  each(region.blocks, offset, bytes, [&](Block& b, uint32_t, uint64_t) { write_block(b); });
  std::memcpy(address, values, bytes);
}

Core& core() {
  static Core the;
  return the;
}

void inside(const char* does, int64_t offset, int64_t bytes, int64_t size, const Buffer* buffer,
            uint32_t generation) {
  if (!buffer)
    core().fault("%s a tensor without memory: AllocTensor, DeQue or TBuf::Get gives it some", does);
  if (buffer->generation != generation || buffer->state == Buffer::kIdle)
    core().fault("%s a tensor of %s after FreeTensor gave its memory back", does, buffer->owner.c_str());
  if (offset < 0 || size < 0 || offset + bytes > size)
    core().fault("%s bytes %lld to %lld of a tensor of %s that has %lld", does, (long long)offset,
                 (long long)(offset + bytes), buffer->owner.c_str(), (long long)size);
}

void aligned(const char* operand, int64_t address, uint32_t to) {
  if (address % to)
    core().fault("%s begins at byte %lld of local memory, expected a multiple of %u", operand,
                 (long long)address, to);
}

Buffer* lend(uint32_t len, const std::string& owner) {
  Core& core = emulation::core();
  const uint32_t bytes = (len + kDataBlock - 1) / kDataBlock * kDataBlock;
  if (!len) core.fault("%s asks for no memory", owner.c_str());
  if (uint64_t(core.local_used) + bytes > kLocalMemory)
    core.fault("%s needs %u bytes of local memory behind %u that are given out, and there are %u",
               owner.c_str(), bytes, core.local_used, kLocalMemory);
  Buffer& buffer = core.buffers.emplace_back();
  buffer.address = core.local_used;
  buffer.bytes = bytes;
  buffer.owner = owner;
  core.local_used += bytes;
  if (core.local_used > core.local_peak) core.local_peak = core.local_used;
  return &buffer;
}

void within(const char* field, int64_t value, int64_t low, int64_t high) {
  if (value < low || value > high)
    core().fault("%s is %lld, expected %lld to %lld", field, (long long)value, (long long)low,
                 (long long)high);
}

void count_copy(const Buffer* buffer, uint64_t in, uint64_t out) {
  core().spend(kCopyStart + double(in + out) / kCopyBytes);
  auto& bytes = core().queues[buffer ? buffer->owner : "nobody"];
  bytes.first += in;
  bytes.second += out;
}

void check_copy(const DataCopyParams& params, int64_t odd) {
  if (odd)
    core().fault("copies %lld bytes, expected a multiple of %u: DataCopyPad takes any length", (long long)odd,
                 kDataBlock);
  within("blockLen", params.blockLen, 1, 65535);
  within("srcStride", params.srcStride, 0, 65535);
  within("dstStride", params.dstStride, 0, 65535);
}

namespace {

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

}  // namespace

std::string report(const Fault* fault, int blocks, const double (&worst)[kPipes]) {
  Core& c = core();
  std::string out = "{\"blocks\": " + std::to_string(blocks) + ", \"block\": " + std::to_string(c.block);
  if (fault)
    return out + ", \"fault\": {\"text\": " + quoted(fault->text) + ", \"file\": " + quoted(fault->file) +
           ", \"line\": " + std::to_string(fault->line) + ", \"instruction\": " + quoted(fault->instruction) +
           "}}";
  out += ", \"local_peak\": " + std::to_string(c.local_peak) + ", \"instructions\": [";
  const char* comma = "";
  for (const auto& [key, i] : c.instructions) {
    out += comma + ("[" + quoted(i.name)) + ", \"" + kPipeNames[i.pipe] + "\", " + quoted(i.here.file) +
           ", " + std::to_string(i.here.line) + ", " + std::to_string(i.issued) + "]";
    comma = ", ";
  }
  out += "], \"queues\": {";
  comma = "";
  for (const auto& [name, bytes] : c.queues) {
    out += comma + quoted(name) + ": [" + std::to_string(bytes.first) + ", " + std::to_string(bytes.second) +
           "]";
    comma = ", ";
  }
  out += "}, \"tensors\": {";
  comma = "";
  for (const Region& r : c.regions) {
    uint64_t missing = 0;
    if (r.writable && !r.readable)
      for (const int16_t owner : r.owner) missing += owner < 0;
    out += comma + quoted(r.name) + ": [" + std::to_string(r.read) + ", " + std::to_string(r.wrote) + ", " +
           std::to_string(missing) + "]";
    comma = ", ";
  }
  out += "}, \"cycles\": {";
  comma = "";
  for (int p = 0; p < kPipes; ++p) {
    out += comma + quoted(kPipeNames[p]) + ": " + std::to_string(worst[p]);
    comma = ", ";
  }
  return out + "}}";
}

}  // namespace AscendC::emulation

namespace AscendC {

std::string TPipe::next_name(TPosition position) {
  return std::string(emulation::position_name(position)) + " " + std::to_string(named_++);
}

TEventID TPipe::free_event(int kind, const char* instruction, Here here) {
  emulation::Core& core = emulation::core();
  core.begin(PIPE_S, instruction, here);
  for (int id = 0; id < emulation::kEvents - core.queued[kind]; ++id)
    if (!core.taken[kind][id]) return TEventID(id);
  core.fault(
      "all %d events %s are taken: ReleaseEventID gives one back, and each buffer of a queue holds one",
      emulation::kEvents, emulation::event_name(kind).c_str());
}

}  // namespace AscendC
