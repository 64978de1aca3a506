// One vector core: its pipes, the order between them, and what each byte of memory remembers.
#pragma once

#include <cstdarg>
#include <cstdio>
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
constexpr uint32_t kDataBlock = 32;         // bytes: the unit of addresses and strides in local memory
constexpr uint32_t kRepeatBytes = 256;      // what a vector instruction does in one repeat
constexpr int kMaxRepeats = 255;
constexpr int kKinds = 16, kEvents = 8;     // from each pipe to each; of each kind
constexpr uint32_t kLocalMemory = 192 * 1024;

// Estimates only. Assumed: a repeat a cycle behind a start of 16; 1.6 TB/s over 48 vector cores at 1.8 GHz, which is
// 18 bytes a cycle for each, behind a start of 64; 16 cycles for a scalar that waits for memory.
constexpr double kVectorStart = 16, kCopyStart = 64, kCopyBytes = 18, kScalarCycles = 16;

inline std::string event_name(int kind) {
    return std::string(kPipeNames[kind / 4]) + "_" + kPipeNames[kind % 4];
}

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
    std::string owner;        // "VECIN 0": position, and number in the order of InitBuffer
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
    double cycles[kPipes] = {};                                   // of this block, estimated
    std::deque<Buffer> buffers;
    uint32_t local_used = 0, local_peak = 0;
    Flag flags[kKinds][kEvents];
    bool taken[kKinds][kEvents] = {};  // by AllocEventID
    int queued[kKinds] = {};           // buffers of queues, each of which takes an event of this kind
    std::map<std::tuple<const char*, const char*, int>, Instruction> instructions;

    // Before a launch: forget the one before.
    void reset() {
        regions.clear();
        queues.clear();
        instructions.clear();
        current_ = nullptr;
        local_peak = 0;
    }
    void add_region(const char* name, uint8_t* begin, uint64_t bytes, bool readable, bool writable) {
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

    void start_block(int index) {
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
    // What a kernel must not leave behind: the next one would find it.
    void end_block() {
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

    // Issue an instruction. What S has waited for came before all that it issues from then on; what S itself has
    // stored is in order with the other pipes only after an event.
    void begin(pipe_t pipe, const char* name, Here here) {
        auto found = instructions.try_emplace({name, here.file, here.line}, Instruction{name, here, pipe});
        current_ = &found.first->second;
        ++current_->issued;
        const uint32_t stored = clocks_[pipe].at[PIPE_S];
        clocks_[pipe].merge(clocks_[PIPE_S]);
        if (pipe != PIPE_S) clocks_[pipe].at[PIPE_S] = stored;
        ++clocks_[pipe].at[pipe];
    }
    void spend(double amount) { cycles[current_->pipe] += amount; }

    Clock stamp(pipe_t pipe) const { return clocks_[pipe]; }
    void wait(pipe_t pipe, const Clock& stamp) { clocks_[pipe].merge(stamp); }
    void barrier() {
        Clock all;
        for (const Clock& clock : clocks_) all.merge(clock);
        for (Clock& clock : clocks_) clock = all;
    }

    [[noreturn]] __attribute__((format(printf, 2, 3))) void fault(const char* format, ...) const {
        char text[600];
        va_list args;
        va_start(args, format);
        std::vsnprintf(text, sizeof text, format, args);
        va_end(args);
        if (!current_) throw Fault{text, "", "", 0};
        throw Fault{text, current_->here.file, current_->name, current_->here.line};
    }

    // The current instruction reads or writes bytes of local memory. The caller has checked that they exist.
    void read_local(uint32_t address, uint32_t bytes) {
        each(memory_, address, bytes, [&](Block& b, uint32_t mask, uint64_t) {
            if ((b.written & mask) != mask) fault_unwritten("local memory", address, bytes);
            read_block(b);
        });
    }
    void write_local(uint32_t address, uint32_t bytes) {
        each(memory_, address, bytes, [&](Block& b, uint32_t mask, uint64_t) {
            write_block(b);
            b.written |= mask;
        });
    }
    // Bytes whose content nobody promises, as the rest of a data block behind a copy without padding.
    void spoil_local(uint32_t address, uint32_t bytes) {
        each(memory_, address, bytes, [&](Block& b, uint32_t mask, uint64_t) {
            write_block(b);
            b.written &= ~mask;
        });
    }

    void read_global(const uint8_t* address, uint64_t bytes) {
        Region& region = find(address, bytes, "reads");
        const uint64_t offset = address - region.begin;
        region.read += bytes;
        if (!region.writable) return;
        for (uint64_t i = offset; i < offset + bytes; ++i) {
            if (region.owner[i] < 0 && !region.readable) fault_unwritten(region.name.c_str(), offset, bytes);
            if (region.owner[i] >= 0 && region.owner[i] != block)
                fault("reads byte %llu of %s, which block %d writes; blocks run in any order: leave it to another "
                      "launch, or to the block that writes it",
                      (unsigned long long)i, region.name.c_str(), int(region.owner[i]));
        }
        each(region.blocks, offset, bytes, [&](Block& b, uint32_t, uint64_t) { read_block(b); });
    }
    void write_global(uint8_t* address, const uint8_t* values, uint64_t bytes) {
        Region& region = find(address, bytes, "writes");
        const uint64_t offset = address - region.begin;
        region.wrote += bytes;
        if (!region.writable)
            fault("writes %llu bytes to %s, which is an input", (unsigned long long)bytes, region.name.c_str());
        for (uint64_t i = 0; i < bytes; ++i) {
            int16_t& owner = region.owner[offset + i];
            if (owner >= 0 && owner != block && address[i] != values[i])
                fault("writes byte %llu of %s, to which block %d has given another value; blocks run in any order: "
                      "give every byte to one of them",
                      (unsigned long long)(offset + i), region.name.c_str(), int(owner));
            owner = int16_t(block);
        }
        each(region.blocks, offset, bytes, [&](Block& b, uint32_t, uint64_t) { write_block(b); });
        std::memcpy(address, values, bytes);
    }

private:
    Clock clocks_[kPipes];
    Instruction* current_ = nullptr;
    std::vector<Block> memory_;

    template <class Visit>
    void each(std::vector<Block>& memory, uint64_t address, uint64_t bytes, Visit visit) {
        const uint64_t end = address + bytes;
        while (address < end) {
            const uint64_t index = address / kDataBlock, first = address % kDataBlock;
            const uint64_t n = end - address < kDataBlock - first ? end - address : kDataBlock - first;
            const uint32_t mask = n == kDataBlock ? ~0u : ((1u << n) - 1u) << first;
            visit(memory[index], mask, address);
            address += n;
        }
    }

    void own(Block& b) const {
        if (b.block == block) return;
        const uint32_t written = b.written;
        b = Block();
        b.written = written;
        b.block = block;
    }
    void read_block(Block& b) {
        own(b);
        const pipe_t pipe = current_->pipe;
        if (b.writer && clocks_[pipe].at[b.writer->pipe] < b.write_time) race("reads", "wrote", b.writer);
        // A scalar is in its register before the program goes on.
        if (pipe == PIPE_S) return;
        b.read_time[pipe] = clocks_[pipe].at[pipe];
        b.reader[pipe] = current_;
    }
    void write_block(Block& b) {
        own(b);
        const pipe_t pipe = current_->pipe;
        if (b.writer && clocks_[pipe].at[b.writer->pipe] < b.write_time) race("writes", "wrote", b.writer);
        for (int p = 0; p < kPipes; ++p)
            if (b.reader[p] && clocks_[pipe].at[p] < b.read_time[p]) race("writes", "reads", b.reader[p]);
        b.write_time = clocks_[pipe].at[pipe];
        b.writer = current_;
    }
    [[noreturn]] void race(const char* does, const char* did, const Instruction* other) const {
        const char *from = kPipeNames[other->pipe], *to = kPipeNames[current_->pipe];
        fault("%s what %s (line %d, pipe %s) %s, and no event orders pipe %s behind pipe %s: pass the tensor through "
              "its queue (EnQue, DeQue; FreeTensor before it is allocated again), or SetFlag and WaitFlag "
              "<HardEvent::%s_%s>",
              does, other->name, other->here.line, from, did, to, from, from, to);
    }
    [[noreturn]] void fault_unwritten(const char* memory, uint64_t at, uint64_t bytes) const {
        fault("reads %llu bytes at %llu of %s, and nobody has written all of them", (unsigned long long)bytes,
              (unsigned long long)at, memory);
    }
    Region& find(const uint8_t* address, uint64_t bytes, const char* does) {
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
};

// The core that runs now: blocks run one after the other.
inline Core& core() {
    static Core the;
    return the;
}

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
