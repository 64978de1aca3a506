// Names and times of the operators that one thread runs, for little: a name is copied and a clock read twice, where
// PyTorch's own profiler also keeps what its other views need.
//
// What has no place in PyTorch's stable ABI is needed here, so a library serves the one version it was built with.
#include <ATen/record_function.h>
#include <c10/util/ApproximateClock.h>
#include <torch/csrc/profiler/orchestration/observer.h>

#include <atomic>
#include <cstdint>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

namespace {

struct Event {
  int64_t start;
  int64_t end;  // 0 while it runs
  int64_t name;  // where it begins in `names`
};

struct Moment {
  int64_t ticks;
  int64_t nanoseconds;
};

std::atomic<bool> taken{false};  // one thread at a time
thread_local bool watching = false;
std::vector<Event> events;
std::vector<char> names;
std::vector<std::pair<const at::RecordFunction*, size_t>> open;  // innermost last
at::CallbackHandle handle;
Moment began;

int64_t ticks() { return static_cast<int64_t>(c10::getApproximateTime()); }

Moment now() { return {ticks(), c10::getTime()}; }

// Annotations from Python are made only while some profiler is at work.
struct AtWork final : torch::profiler::impl::ProfilerStateBase {
  AtWork()
      : ProfilerStateBase(
            torch::profiler::impl::ProfilerConfig(torch::profiler::impl::ProfilerState::Disabled)) {}
  torch::profiler::impl::ActiveProfilerType profilerType() override {
    return torch::profiler::impl::ActiveProfilerType::NONE;
  }
  void reportMemoryUsage(void*, int64_t, size_t, size_t, c10::Device) override {}
};

std::unique_ptr<at::ObserverContext> starting(const at::RecordFunction& fn) {
  if (!watching) return nullptr;  // a thread that took over this one's settings
  const char* name = fn.name();
  open.emplace_back(&fn, events.size());
  events.push_back({0, 0, static_cast<int64_t>(names.size())});
  names.insert(names.end(), name, name + std::strlen(name) + 1);
  events.back().start = ticks();
  return nullptr;
}

void ending(const at::RecordFunction& fn, at::ObserverContext*) {
  const int64_t end = ticks();
  if (!watching) return;
  // Nearly always the innermost; an annotation may end after what it was begun in.
  for (size_t i = open.size(); i-- > 0;) {
    if (open[i].first == &fn) {
      events[open[i].second].end = end;
      open.erase(open.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// 0, or 1 where another profiler is at work. What was recorded stays until recorder_release.
EXPORT int recorder_start() {
  using torch::profiler::impl::ProfilerStateBase;
  if (ProfilerStateBase::get() != nullptr || taken.exchange(true)) return 1;
  events.clear();
  names.clear();
  open.clear();
  ProfilerStateBase::push(std::make_shared<AtWork>());
  began = now();
  watching = true;
  handle = at::addThreadLocalCallback(at::RecordFunctionCallback(starting, ending));
  return 0;
}

EXPORT void recorder_stop() {
  at::removeCallback(handle);
  watching = false;
  torch::profiler::impl::ProfilerStateBase::pop(/*global=*/false);
  const Moment ended = now();
  for (const auto& [fn, place] : open) events[place].end = ended.ticks;
  open.clear();
  const double rate = static_cast<double>(ended.nanoseconds - began.nanoseconds) /
                      static_cast<double>(ended.ticks > began.ticks ? ended.ticks - began.ticks : 1);
  for (Event& event : events) {
    for (int64_t* time : {&event.start, &event.end}) {
      *time = began.nanoseconds + static_cast<int64_t>(static_cast<double>(*time - began.ticks) * rate);
    }
  }
}

EXPORT void recorder_release() { taken = false; }
EXPORT int64_t recorder_count() { return static_cast<int64_t>(events.size()); }
EXPORT const Event* recorder_events() { return events.data(); }
EXPORT int64_t recorder_name_bytes() { return static_cast<int64_t>(names.size()); }
EXPORT const char* recorder_names() { return names.data(); }
