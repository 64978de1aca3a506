// TPipe hands out local memory; a TQue lends it in turns, a TBuf for good. A queue is also the order between pipes:
// EnQue after the producer, DeQue before the consumer; FreeTensor after the consumer, AllocTensor before the producer.
// SetFlag and WaitFlag are that order alone.
#pragma once

#include "memory.h"

namespace AscendC {

namespace emulation {

// Who fills the buffers of a queue, and who empties them.
constexpr pipe_t producer(TPosition position) { return position == TPosition::VECIN ? PIPE_MTE2 : PIPE_V; }
constexpr pipe_t consumer(TPosition position) { return position == TPosition::VECOUT ? PIPE_MTE3 : PIPE_V; }

constexpr const char* position_name(TPosition position) {
  return position == TPosition::VECIN ? "VECIN" : position == TPosition::VECOUT ? "VECOUT" : "VECCALC";
}

// The memory behind a TQue or a TBuf.
Buffer* lend(uint32_t len, const std::string& owner);

}  // namespace emulation

template <TPosition position = TPosition::VECCALC>
class TBuf {
 public:
  template <class T>
  LocalTensor<T> Get(Here here = Here::now()) {
    return Get<T>(bytes(here) / sizeof(T), here);
  }
  template <class T>
  LocalTensor<T> Get(uint32_t count, Here here = Here::now()) {
    if (uint64_t(count) * sizeof(T) > bytes(here))
      emulation::core().fault("asks %s for %llu bytes, InitBuffer gave it %u", buffer_->owner.c_str(),
                              (unsigned long long)count * sizeof(T), buffer_->bytes);
    return LocalTensor<T>(buffer_->address, count * sizeof(T), buffer_);
  }

 private:
  friend class TPipe;
  emulation::Buffer* buffer_ = nullptr;

  uint32_t bytes(Here here) const {
    emulation::core().begin(PIPE_S, "TBuf::Get", here);
    if (!buffer_) emulation::core().fault("this TBuf has no memory: TPipe::InitBuffer gives it some");
    return buffer_->bytes;
  }
};

template <TPosition position, int depth, auto mask = 0>
class TQue {
  static_assert(position == TPosition::VECIN || position == TPosition::VECOUT ||
                    position == TPosition::VECCALC,
                "a queue of a vector core is VECIN, VECOUT or VECCALC");
  static_assert(depth >= 1, "a queue holds at least one tensor");
  using Buffer = emulation::Buffer;

 public:
  template <class T>
  LocalTensor<T> AllocTensor(Here here = Here::now()) {
    emulation::Core& core = start("AllocTensor", here);
    for (size_t i = 0; i < buffers_.size(); ++i) {
      Buffer& buffer = *buffers_[(next_ + i) % buffers_.size()];
      if (buffer.state != Buffer::kIdle) continue;
      next_ = (next_ + i + 1) % buffers_.size();
      buffer.state = Buffer::kAllocated;
      ++buffer.generation;
      buffer.allocated = here;
      core.wait(emulation::producer(position), buffer.freed);
      return LocalTensor<T>(buffer.address, buffer.bytes, &buffer);
    }
    core.fault("all %zu buffers of %s are in use: FreeTensor gives one back", buffers_.size(), name());
  }
  template <class T>
  bool EnQue(const LocalTensor<T>& tensor, Here here = Here::now()) {
    emulation::Core& core = start("EnQue", here);
    Buffer& buffer = own(tensor);
    if (buffer.state != Buffer::kAllocated)
      core.fault("the tensor is in %s already, or was taken out: AllocTensor gives one that can be queued",
                 name());
    if (waiting_.size() >= size_t(depth))
      core.fault("%s has a depth of %d and holds as many tensors already: DeQue takes one out", name(),
                 depth);
    buffer.state = Buffer::kQueued;
    buffer.enqueued = core.stamp(emulation::producer(position));
    waiting_.push_back(&buffer);
    return true;
  }
  template <class T>
  LocalTensor<T> DeQue(Here here = Here::now()) {
    emulation::Core& core = start("DeQue", here);
    if (waiting_.empty())
      core.fault("%s is empty, and a board would wait for ever: EnQue comes first", name());
    Buffer& buffer = *waiting_.front();
    waiting_.pop_front();
    buffer.state = Buffer::kTaken;
    core.wait(emulation::consumer(position), buffer.enqueued);
    return LocalTensor<T>(buffer.address, buffer.bytes, &buffer);
  }
  template <class T>
  void FreeTensor(LocalTensor<T>& tensor, Here here = Here::now()) {
    emulation::Core& core = start("FreeTensor", here);
    Buffer& buffer = own(tensor);
    if (buffer.state == Buffer::kQueued)
      core.fault("the tensor waits in %s: DeQue takes it out first", name());
    if (buffer.state == Buffer::kIdle) core.fault("the tensor of %s was given back before", name());
    if (buffer.state == Buffer::kTaken) buffer.freed = core.stamp(emulation::consumer(position));
    buffer.state = Buffer::kIdle;
  }
  bool HasTensorInQue() const { return !waiting_.empty(); }
  int32_t GetTensorCountInQue() const { return int32_t(waiting_.size()); }

 private:
  friend class TPipe;
  std::vector<Buffer*> buffers_;
  std::deque<Buffer*> waiting_;
  size_t next_ = 0;

  const char* name() const { return buffers_.front()->owner.c_str(); }
  emulation::Core& start(const char* instruction, Here here) {
    emulation::Core& core = emulation::core();
    core.begin(PIPE_S, instruction, here);
    if (buffers_.empty()) core.fault("this queue has no memory: TPipe::InitBuffer gives it some");
    return core;
  }
  template <class T>
  Buffer& own(const LocalTensor<T>& tensor) {
    for (Buffer* buffer : buffers_)
      if (buffer == tensor.buffer()) {
        if (buffer->generation != tensor.generation())
          emulation::core().fault("the tensor of %s was given back by FreeTensor before", name());
        return *buffer;
      }
    emulation::core().fault("the tensor is none of %s", name());
  }
};

class TPipe {
 public:
  TPipe() { current() = this; }
  TPipe(const TPipe&) = delete;

  template <TPosition position, int depth, auto mask>
  bool InitBuffer(TQue<position, depth, mask>& queue, uint8_t num, uint32_t len, Here here = Here::now()) {
    emulation::Core& core = emulation::core();
    core.begin(PIPE_S, "InitBuffer", here);
    const std::string name = next_name(position);
    const pipe_t from = emulation::producer(position), to = emulation::consumer(position);
    for (int i = 0; i < num; ++i) {
      queue.buffers_.push_back(emulation::lend(len, name));
      if (from == to) continue;
      for (const int kind : {from * 4 + to, to * 4 + from})
        if (++core.queued[kind] > emulation::kEvents)
          core.fault(
              "%s brings the buffers of queues at this position to %d, and there are %d events for "
              "them",
              name.c_str(), core.queued[kind], emulation::kEvents);
    }
    return true;
  }
  template <TPosition position>
  bool InitBuffer(TBuf<position>& buf, uint32_t len, Here here = Here::now()) {
    emulation::core().begin(PIPE_S, "InitBuffer", here);
    buf.buffer_ = emulation::lend(len, "TBuf " + next_name(position));
    buf.buffer_->state = emulation::Buffer::kForGood;
    return true;
  }

  template <HardEvent event>
  TEventID AllocEventID(Here here = Here::now()) {
    const TEventID id = free_event(int(event), "AllocEventID", here);
    emulation::core().taken[int(event)][id] = true;
    return id;
  }
  template <HardEvent event>
  void ReleaseEventID(TEventID id) {
    emulation::core().taken[int(event)][id] = false;
  }
  // An event for a SetFlag and a WaitFlag close by; it stays free for others.
  TEventID FetchEventID(HardEvent event, Here here = Here::now()) {
    return free_event(int(event), "FetchEventID", here);
  }

  static TPipe*& current() {
    static TPipe* the = nullptr;
    return the;
  }

 private:
  int named_ = 0;

  std::string next_name(TPosition position);
  TEventID free_event(int kind, const char* instruction, Here here);
};

inline TPipe* GetTPipePtr() { return TPipe::current(); }

template <HardEvent event>
void SetFlag(TEventID id, Here here = Here::now()) {
  emulation::Core& core = emulation::core();
  core.begin(PIPE_S, "SetFlag", here);
  if (id < 0 || id >= emulation::kEvents) core.fault("event %d: there are %d", id, emulation::kEvents);
  emulation::Flag& flag = core.flags[int(event)][id];
  if (flag.set)
    core.fault("event %s %d was set in line %d, and nobody has waited for it since",
               emulation::event_name(int(event)).c_str(), id, flag.here.line);
  flag = {true, core.stamp(pipe_t(int(event) / 4)), here};
}

template <HardEvent event>
void WaitFlag(TEventID id, Here here = Here::now()) {
  emulation::Core& core = emulation::core();
  core.begin(PIPE_S, "WaitFlag", here);
  if (id < 0 || id >= emulation::kEvents) core.fault("event %d: there are %d", id, emulation::kEvents);
  emulation::Flag& flag = core.flags[int(event)][id];
  if (!flag.set)
    core.fault("waits for event %s %d, which nobody has set: a board would wait for ever",
               emulation::event_name(int(event)).c_str(), id);
  flag.set = false;
  core.wait(pipe_t(int(event) % 4), flag.stamp);
}

// Within a pipe instructions follow each other here as they stand; PIPE_ALL waits for every pipe.
template <pipe_t pipe>
void PipeBarrier(Here here = Here::now()) {
  emulation::core().begin(PIPE_S, "PipeBarrier", here);
  if (pipe == PIPE_ALL) emulation::core().barrier();
}

}  // namespace AscendC
