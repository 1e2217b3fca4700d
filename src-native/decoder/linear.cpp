#include "linear.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <type_traits>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#if defined(PIPEEDGE_DECODER_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../parallel/in_threads.hpp"
#include "../processor/features.hpp"
#include "variants.hpp"

namespace pipeedge::decoder {

namespace {

constexpr std::size_t kLine = 64;
/// Size of a large page, and of memory for which one is worth while.
constexpr std::size_t kLargePage = std::size_t{2} << 20;
constexpr std::size_t kChunk = 32 * kLargePage;  // that small pieces of memory share
/// Units of inputs whose products are added before the next tile of rows, if there are many rows: those of a tile then
/// stay in the first-level cache. A multiple of a group's.
constexpr std::size_t kUnitsAtOnce = 512;
/// Tiles of rows from which on there are many.
constexpr std::size_t kManyTiles = 4;
/// Rows from which on codes of 4 bits are widened.
constexpr std::size_t kManyRows = 12;

std::size_t parts_of(std::size_t whole, std::size_t part) { return (whole + part - 1) / part; }

/// Whether rows are multiplied as codes of 8 bits.
bool takes_codes(Type type) { return type == Type::kInt8 || type == Type::kInt4; }

std::size_t values_of_unit(Type type) { return type == Type::kFloat32 ? 1 : type == Type::kBfloat16 ? 2 : kUnit; }

std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

float widened(float value) { return value; }
float widened(Half half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

/// The bits of the nearest bfloat16, ties to even; NaN for NaN.
Half narrowed(Half half) { return half; }
Half narrowed(float value) {
  if (std::isnan(value)) return kNotANumber;
  const std::uint32_t bits = bits_of(value);
  return static_cast<Half>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

template <typename Value>
std::uint32_t pair_of(const Value* values) {
  return narrowed(values[0]) | static_cast<std::uint32_t>(narrowed(values[1])) << 16;
}

/// Returns whole groups of float32 that begin with `count` values and go on with zeros: the values themselves, or in
/// `room`.
template <typename Value>
const float* whole_groups(const Value* values, std::size_t count, float* room) {
  if constexpr (std::is_same_v<Value, float>) {
    if (count % kGroup == 0) return values;
  }
  for (std::size_t i = 0; i < count; ++i) room[i] = widened(values[i]);
  std::fill(room + count, room + parts_of(count, kGroup) * kGroup, 0.0F);
  return room;
}

/// Rounds the inputs [kGroup, kColumns] of a group to 4 bits, and keeps those of `count` outputs from a column on.
void fit_group(const float* weights, std::size_t column, std::size_t count, PanelGroup& out) {
  std::uint8_t codes[kGroup * kColumns], zeros[kColumns];
  Half scales[kColumns];
  best_variant().fit(weights, codes, scales, zeros);
  for (std::size_t n = column; n < column + count; ++n) {
    out.scales[n] = scales[n];
    out.zeros[n] = zeros[n];
    for (std::size_t k = 0; k < kGroup; ++k) out.codes[n][k] = static_cast<WeightCode>(codes[k * kColumns + n]);
  }
}

#ifdef PIPEEDGE_DECODER_AMX
/// Returns whether this processor has tiles of bfloat16, and the system lets this process use them.
bool has_amx() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  constexpr unsigned kFeatures = 7, kBf16 = 1U << 22, kTiles = 1U << 24;
  if (__get_cpuid_count(kFeatures, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kBf16) == 0 || (edx & kTiles) == 0) return false;
  constexpr int kAskPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kAskPermission, kTileData) == 0;
}
#endif

std::vector<Variant> find_variants() {
  std::vector<Variant> found;
#ifdef PIPEEDGE_DECODER_X86
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    if (__builtin_cpu_supports("avx512vnni")) {
      Variant vnni = kAvx512;
      vnni.name = "avx512vnni";
      vnni.products[static_cast<int>(Type::kInt8)] = kCodesAvx512;
      vnni.products[static_cast<int>(Type::kInt4)] = kNibblesAvx512;
#ifdef PIPEEDGE_DECODER_BF16
      if (__builtin_cpu_supports("avx512bf16")) {
        Variant bf16 = vnni;
        bf16.name = "avx512bf16";
        bf16.products[static_cast<int>(Type::kBfloat16)] = kHalvesAvx512;
        found.push_back(bf16);
      }
#endif
#ifdef PIPEEDGE_DECODER_AMX
      if (has_amx()) {
        Variant amx = found.empty() ? vnni : found.front();
        amx.name = "amxbf16";
        amx.products[static_cast<int>(Type::kBfloat16)] = kHalvesAmx;
        found.insert(found.begin(), amx);
      }
#endif
      found.push_back(vnni);
    }
    found.push_back(kAvx512);
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found.push_back(kAvx2);
#endif
#ifdef PIPEEDGE_DECODER_ARM
  // Each has the products of the one before it, unless it has better ones.
  const processor::ArmFeatures here = processor::arm_features();
  found.push_back(kNeon);
  const auto add = [&](const char* name, Type type, const Product& product) {
    if (found.front().name != std::string(name)) found.insert(found.begin(), found.front());
    found.front().name = name;
    found.front().products[static_cast<int>(type)] = product;
  };
  if (here.dot_products) {
    add("neondot", Type::kInt8, kCodesNeonDot);
    add("neondot", Type::kInt4, kNibblesNeonDot);
  }
#ifdef PIPEEDGE_ARM_BF16
  if (here.bfloat16) add("neonbf16", Type::kBfloat16, kHalvesNeon);
#endif
#endif
  found.push_back(kPortable);
  return found;
}

}  // namespace

const std::vector<Variant>& variants() {
  static const std::vector<Variant> found = find_variants();
  return found;
}

const Variant* find_variant(const std::string& name) {
  for (const Variant& variant : variants()) {
    if (variant.name == name) return &variant;
  }
  return nullptr;
}

const Variant& best_variant() { return variants().front(); }

const Coding* find_coding(const std::string& name) {
  for (const Coding* coding = best_variant().codings; coding->name != nullptr; ++coding) {
    if (name == coding->name) return coding;
  }
  return nullptr;
}

// Large memory does not come from the heap: parts of files that were read are freed there, and would stay resident in
// front of what begins on a large page, and what the heap has kept would have to be cleared, even for weights that a
// stage then adopts. The system gives memory of zeros page by page, when it is first written.
Memory::Memory(std::size_t bytes) : bytes_(bytes) {
  if (bytes == 0) return;
  std::size_t alignment = kLine;
#if defined(__linux__)
  if (bytes >= kLargePage) {
    alignment = kLargePage;
    const std::size_t whole = bytes + alignment;
    void* const block = mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (block == MAP_FAILED) throw std::bad_alloc();
    block_.reset(block, [whole](void* begin) { munmap(begin, whole); });
  }
#endif
  if (block_ == nullptr) {
    void* const block = std::calloc(bytes + alignment, 1);
    if (block == nullptr) throw std::bad_alloc();
    block_.reset(block, std::free);
  }
  const std::size_t over = reinterpret_cast<std::uintptr_t>(block_.get()) % alignment;
  data_ = static_cast<char*>(block_.get()) + (over == 0 ? 0 : alignment - over);
#if defined(__linux__)
  if (bytes >= kLargePage) madvise(data_, bytes, MADV_HUGEPAGE);
#endif
}

Memory Memory::among_others(std::size_t bytes) {
  if (bytes == 0 || bytes >= kLargePage) return Memory(bytes);
  struct Chunk {
    Memory memory{kChunk};
    std::vector<int> pieces = std::vector<int>(kChunk / kLargePage);  // in each large page
    std::size_t used = 0;
  };
  static std::mutex mutex;
  static std::weak_ptr<Chunk> latest;
  std::shared_ptr<Chunk> chunk;
  Memory piece;
  std::size_t first = 0, last = 0;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    chunk = latest.lock();
    if (chunk == nullptr || chunk->used + bytes > kChunk) latest = chunk = std::make_shared<Chunk>();
    piece.data_ = chunk->memory.data() + chunk->used;
    piece.bytes_ = bytes;
    first = chunk->used / kLargePage;
    last = (chunk->used + bytes - 1) / kLargePage;
    for (std::size_t page = first; page <= last; ++page) ++chunk->pieces[page];
    chunk->used += parts_of(bytes, kLine) * kLine;
  }
  piece.block_ = std::shared_ptr<void>(piece.data_, [chunk, first, last](void*) {
    const std::lock_guard<std::mutex> lock(mutex);
    for (std::size_t page = first; page <= last; ++page) {
      if (--chunk->pieces[page] > 0) continue;
#if defined(__linux__)
      // Its rest, if that is used later, is of value 0 again.
      madvise(chunk->memory.data() + page * kLargePage, kLargePage, MADV_DONTNEED);
#endif
    }
  });
  return piece;
}

void Operand::resize(Type type, std::size_t rows, std::size_t width) {
  type_ = type;
  rows_ = rows;
  width_ = width;
  padded_ = parts_of(width, kGroup) * kGroup;
  // An odd number of cache lines, so that the rows of a tile do not compete for the same places in the cache.
  stride_ = (parts_of(padded_ / values_of_unit(type) * kUnit, kLine) | 1) * kLine;
  if (rows * stride_ > codes_.bytes()) codes_ = Memory(rows * stride_);
  if (takes_codes(type)) {
    scales_.resize(rows * padded_ / kGroup);
    starts_.resize(rows * padded_ / kGroup);
  }
}

void Operand::set(const Variant& variant, std::size_t row, const float* x) {
  char* to = codes_.data() + row * stride_;
  switch (type_) {
    case Type::kFloat32:
      std::memcpy(to, x, width_ * sizeof(float));
      std::memset(to + width_ * sizeof(float), 0, (padded_ - width_) * sizeof(float));
      break;
    case Type::kBfloat16:
      variant.narrow(x, width_, reinterpret_cast<Half*>(to));
      std::memset(to + width_ * sizeof(Half), 0, (padded_ - width_) * sizeof(Half));
      break;
    case Type::kInt8:
    case Type::kInt4: {
      const std::size_t groups = padded_ / kGroup, whole = width_ / kGroup;
      auto* codes = reinterpret_cast<std::int8_t*>(to);
      variant.quantise(x, whole * kGroup, codes, scales_.data() + row * groups, starts_.data() + row * groups);
      if (whole < groups) {
        float rest[kGroup] = {};
        std::memcpy(rest, x + whole * kGroup, (width_ - whole * kGroup) * sizeof(float));
        variant.quantise(rest, kGroup, codes + whole * kGroup, scales_.data() + row * groups + whole,
                         starts_.data() + row * groups + whole);
      }
      break;
    }
  }
}

Tile Operand::tile(std::size_t row, std::size_t unit) const {
  Tile tile;
  tile.rows = codes_.data() + row * stride_ + unit * kUnit;
  tile.row_stride = stride_;
  if (takes_codes(type_)) {
    tile.group_stride = padded_ / kGroup;
    tile.scales = scales_.data() + row * tile.group_stride + unit * kUnit / kGroup;
    tile.starts = starts_.data() + row * tile.group_stride + unit * kUnit / kGroup;
  }
  return tile;
}

Matrix::Matrix(Type type, std::size_t outputs, std::size_t inputs)
    : type_(type), outputs_(outputs), inputs_(inputs),
      units_(parts_of(inputs, kGroup) * kGroup / values_of_unit(type)) {
  memory_ = Memory::among_others(panels() * panel_bytes());
}

std::size_t Matrix::panel_bytes() const {
  if (type_ == Type::kInt8) return groups() * kGroupBytes;
  if (type_ == Type::kInt4) return groups() * (kNibbleBytes + kColumns * (sizeof(Half) + 1));
  return units_ * kUnit * kColumns;
}

Nibbles Matrix::nibbles(std::size_t panel, std::size_t group) const {
  const char* codes = memory_.data() + panel * panel_bytes();
  const char* scales = codes + groups() * kNibbleBytes;
  Nibbles found;
  found.codes = codes + group * kNibbleBytes;
  found.scales = reinterpret_cast<const Half*>(scales) + group * kColumns;
  found.zeros = reinterpret_cast<const std::uint8_t*>(scales + groups() * kColumns * sizeof(Half)) + group * kColumns;
  return found;
}

/// Reads the codes of a group of an output.
void Matrix::read_group(std::size_t output, std::size_t number, PanelGroup& out) const {
  const std::size_t column = output % kColumns, half = column % (kColumns / 2);
  if (type_ == Type::kInt8) {
    const char* from = memory_.data() + output / kColumns * panel_bytes() + number * kGroupBytes;
    std::memcpy(out.scales + column, from + column * sizeof(Half), sizeof(Half));
    from += kColumns * sizeof(Half) + column * kUnit;
    for (std::size_t k = 0; k < kGroup; k += kUnit) std::memcpy(out.codes[column] + k, from + k * kColumns, kUnit);
    return;
  }
  const Nibbles from = nibbles(output / kColumns, number);
  out.scales[column] = from.scales[column];
  out.zeros[column] = from.zeros[column];
  for (std::size_t k = 0; k < kGroup; ++k) {
    const auto both = static_cast<std::uint8_t>(from.codes[(k / kUnit * (kColumns / 2) + half) * kUnit + k % kUnit]);
    out.codes[column][k] = static_cast<WeightCode>(column == half ? both & kMostNibble : both >> 4);
  }
}

/// Writes the codes of a group of `count` outputs of a panel. Memory is read only where the panel has others: the system
/// would first hand out memory to read, and then other memory to write.
void Matrix::write_group(std::size_t output, std::size_t count, std::size_t number, PanelGroup& group) {
  const std::size_t panel = output / kColumns, begin = panel * kColumns;
  for (std::size_t n = begin; n < begin + kColumns; ++n) {
    if (n < output || n >= output + count) read_group(n, number, group);
  }
  if (type_ == Type::kInt8) {
    char* to = memory_.data() + panel * panel_bytes() + number * kGroupBytes;
    std::memcpy(to, group.scales, sizeof group.scales);
    to += sizeof group.scales;
    for (std::size_t k = 0; k < kGroup; k += kUnit) {
      for (std::size_t n = 0; n < kColumns; ++n, to += kUnit) std::memcpy(to, group.codes[n] + k, kUnit);
    }
    return;
  }
  const Nibbles to = nibbles(panel, number);
  std::memcpy(const_cast<Half*>(to.scales), group.scales, sizeof group.scales);
  std::memcpy(const_cast<std::uint8_t*>(to.zeros), group.zeros, sizeof group.zeros);
  char* unit = const_cast<char*>(to.codes);
  for (std::size_t k = 0; k < kGroup; k += kUnit) {
    for (std::size_t n = 0; n < kColumns / 2; ++n, unit += kUnit) {
      std::uint32_t lower, upper;
      std::memcpy(&lower, group.codes[n] + k, kUnit);
      std::memcpy(&upper, group.codes[n + kColumns / 2] + k, kUnit);
      lower |= upper << 4;
      std::memcpy(unit, &lower, kUnit);
    }
  }
}

template <typename Value>
bool Matrix::put_bytes(std::size_t output, std::size_t count, Span span, const Value* weights, std::size_t stride) {
  PanelGroup groups[kMostGroups];
  const std::size_t some = parts_of(span.count, kGroup);
  bool finite = true;
  for (std::size_t n = 0; n < count; ++n) {
    float room[kSuper];
    const float* values = whole_groups(weights + n * stride, span.count, room);
    finite = best_variant().encode(values, some, output % kColumns + n, groups) && finite;
  }
  for (std::size_t g = 0; g < some; ++g) write_group(output, count, span.first / kGroup + g, groups[g]);
  return finite;
}

/// Number of inputs that are packed together, whole groups, so that what is written stays in the first-level cache.
std::size_t Matrix::inputs_at_once() const { return type_ == Type::kInt8 ? kSuper : kGroup; }

/// Packs at most `inputs_at_once` inputs of outputs of a panel. Returns whether all weights are finite, which it finds
/// out for codes of 8 bits only.
template <typename Value>
bool Matrix::put(std::size_t output, std::size_t count, Span span, const Value* weights, std::size_t stride) {
  const std::size_t column = output % kColumns;
  if (type_ == Type::kInt8) return put_bytes(output, count, span, weights, stride);
  if (type_ == Type::kInt4) {
    PanelGroup group;
    float values[kGroup * kColumns] = {};
    for (std::size_t n = 0; n < count; ++n) {
      for (std::size_t i = 0; i < span.count; ++i) values[i * kColumns + column + n] = widened(weights[n * stride + i]);
    }
    fit_group(values, column, count, group);
    write_group(output, count, span.first / kGroup, group);
    return true;
  }
  char* panel = memory_.data() + output / kColumns * panel_bytes();
  const bool pairs = type_ == Type::kBfloat16;
  const std::size_t values = values_of_unit(type_), first = span.first / values;
  for (std::size_t n = 0; n < count; ++n) {
    const Value* row = weights + n * stride;
    char* to = panel + (first * kColumns + column + n) * kUnit;
    for (std::size_t u = 0; u * values < span.count; ++u) {
      const std::uint32_t unit = !pairs                        ? bits_of(widened(row[u]))
                                 : u * values + 1 < span.count ? pair_of(row + u * values)
                                                               : narrowed(row[u * values]);
      std::memcpy(to + u * kColumns * kUnit, &unit, kUnit);
    }
  }
  return true;
}

/// Calls `work` with each panel that has some of `count` outputs from `first` on, with the first of these and their
/// number, and with at most `most` of its inputs at a time.
template <typename Work>
void Matrix::each_part(std::size_t first, std::size_t count, std::size_t most, std::size_t threads,
                       const Work& work) const {
  constexpr std::size_t kWorkOfValue = 128;  // in multiplications
  const std::size_t begin = first / kColumns, end = parts_of(first + count, kColumns);
  parallel::in_threads(end - begin, kColumns * inputs_ * kWorkOfValue, threads, [&](parallel::Range panels) {
    for (std::size_t p = begin + panels.begin; p < begin + panels.end; ++p) {
      const std::size_t from = std::max(first, p * kColumns), to = std::min(first + count, (p + 1) * kColumns);
      for (std::size_t k = 0; k < inputs_; k += most) work(from, to - from, Span{k, std::min(most, inputs_ - k)});
    }
  });
}

template <typename Value>
void Matrix::pack(std::size_t first, std::size_t count, const Value* weights, std::size_t threads) {
  each_part(first, count, inputs_at_once(), threads, [&](std::size_t output, std::size_t outputs, Span span) {
    put(output, outputs, span, weights + (output - first) * inputs_ + span.first, inputs_);
  });
}

template void Matrix::pack(std::size_t first, std::size_t count, const float* weights, std::size_t threads);
template void Matrix::pack(std::size_t first, std::size_t count, const Half* weights, std::size_t threads);

/// Takes over a group of a row whose form has codes of the matrix's type. Returns whether its weights are finite.
bool Matrix::take_group(const Coding& coding, const std::uint8_t* row, std::size_t number, std::size_t column,
                        PanelGroup& out) const {
  if (type_ == Type::kInt8) {
    ByteGroup found;
    coding.bytes_of(row, number, found);
    out.scales[column] = narrowed(found.scale);
    for (std::size_t k = 0; k < kGroup; ++k) out.codes[column][k] = static_cast<WeightCode>(found.codes[k] + kZero);
    return std::isfinite(found.scale);
  }
  NibbleGroup found;
  if (coding.nibbles_of(row, number, found)) {
    out.scales[column] = narrowed(found.scale);
    out.zeros[column] = static_cast<std::uint8_t>(found.zero);
    std::memcpy(out.codes[column], found.codes, kGroup);
    return std::isfinite(found.scale);
  }
  // A range of weights that our zeros do not reach.
  float unit[kSuper], values[kGroup * kColumns] = {};
  coding.decode(row + number * kGroup / coding.values * coding.bytes, unit);
  const float* weights = unit + number * kGroup % coding.values;
  for (std::size_t k = 0; k < kGroup; ++k) values[k * kColumns + column] = weights[k];
  fit_group(values, column, 1, out);
  return best_variant().finite(weights, kGroup);
}

bool Matrix::pack(std::size_t first, std::size_t count, const Coding& coding, const std::uint8_t* rows,
                  std::size_t threads) {
  const bool direct = type_ == Type::kInt8   ? coding.bytes_of != nullptr
                      : type_ == Type::kInt4 ? coding.nibbles_of != nullptr
                                             : false;
  const std::size_t row_bytes = parts_of(inputs_, coding.values) * coding.bytes;
  std::atomic<bool> finite{true};
  each_part(first, count, kSuper, threads, [&](std::size_t output, std::size_t outputs, Span span) {
    const std::uint8_t* row = rows + (output - first) * row_bytes;
    bool all = true;
    if (direct) {
      PanelGroup group;
      for (std::size_t g = span.first / kGroup; g < parts_of(span.first + span.count, kGroup); ++g) {
        for (std::size_t n = 0; n < outputs; ++n) {
          all = take_group(coding, row + n * row_bytes, g, output % kColumns + n, group) && all;
        }
        write_group(output, outputs, g, group);
      }
    } else {
      alignas(kLine) float values[kColumns * kSuper];
      for (std::size_t n = 0; n < outputs; ++n, row += row_bytes) {
        for (std::size_t k = 0; k < span.count; k += coding.values) {
          coding.decode(row + (span.first + k) / coding.values * coding.bytes, values + n * kSuper + k);
        }
        if (type_ != Type::kInt8) all = best_variant().finite(values + n * kSuper, span.count) && all;
      }
      const std::size_t most = inputs_at_once();
      for (std::size_t k = 0; k < span.count; k += most) {
        const Span some{span.first + k, std::min(most, span.count - k)};
        all = put(output, outputs, some, values + k, kSuper) && all;
      }
    }
    if (!all) finite = false;
  });
  return finite;
}

void Matrix::store_row(std::size_t output, std::uint8_t* row) const {
  const std::size_t column = output % kColumns;
  PanelGroup group;
  for (std::size_t g = 0; g < groups(); ++g) {
    read_group(output, g, group);
    const WeightCode* codes = group.codes[column];
    std::memcpy(row, group.scales + column, sizeof(Half));
    row += sizeof(Half);
    if (type_ == Type::kInt8) {
      for (std::size_t k = 0; k < kGroup; ++k) *row++ = static_cast<std::uint8_t>(codes[k] - kZero);
      continue;
    }
    *row++ = group.zeros[column];
    for (std::size_t k = 0; k < kGroup / 2; ++k)
      *row++ = static_cast<std::uint8_t>(codes[k] | codes[k + kGroup / 2] << 4);
  }
}

void Matrix::unpack(std::size_t output, float* weights) const {
  const char* panel = memory_.data() + output / kColumns * panel_bytes();
  const std::size_t column = output % kColumns;
  PanelGroup group;
  for (std::size_t k = 0; k < inputs_; ++k) {
    if (type_ == Type::kFloat32) {
      std::memcpy(weights + k, panel + (k * kColumns + column) * kUnit, sizeof(float));
    } else if (type_ == Type::kBfloat16) {
      Half half;
      std::memcpy(&half, panel + (k / 2 * kColumns + column) * kUnit + k % 2 * sizeof half, sizeof half);
      weights[k] = widened(half);
    } else {
      if (k % kGroup == 0) read_group(output, k / kGroup, group);
      const int code = group.codes[column][k % kGroup];
      weights[k] = static_cast<float>(type_ == Type::kInt8 ? code - kZero : kParts * code - group.zeros[column]) *
                   widened(group.scales[column]);
    }
  }
}

void Matrix::multiply(const Variant& variant, const Operand& rows, std::size_t begin, std::size_t end,
                      std::size_t first, std::size_t last, float* sums, std::size_t stride) const {
  const std::size_t count = end - begin;
  // Codes of 4 bits are widened to 8 where they serve many rows.
  const bool wide = type_ == Type::kInt4 && count >= kManyRows;
  const Product& product = variant.products[static_cast<int>(wide ? Type::kInt8 : type_)];
  const std::size_t tiles = parts_of(count, product.tile_rows);
  const std::size_t at_once = tiles < kManyTiles && !wide ? units_ : kUnitsAtOnce;
  const std::size_t group_units = kGroup / kUnit;
  std::vector<char> widened_codes(wide ? std::min(units_, at_once) / group_units * kGroupBytes : 0);
  if (product.begin != nullptr) product.begin();
  for (std::size_t unit = 0; unit < units_; unit += at_once) {
    const std::size_t some = std::min(at_once, units_ - unit), group = unit / group_units;
    for (std::size_t p = first; p < last; ++p) {
      const char* panel = memory_.data() + p * panel_bytes();
      Nibbles nibbles_here;
      if (type_ == Type::kInt4) nibbles_here = nibbles(p, group);
      if (wide) {
        variant.expand(nibbles_here, some / group_units, widened_codes.data());
        panel = widened_codes.data();
      } else if (type_ == Type::kInt4) {
        panel = nibbles_here.codes;
      } else {
        panel += type_ == Type::kInt8 ? group * kGroupBytes : unit * kUnit * kColumns;
      }
      for (std::size_t t = 0; t < tiles; ++t) {
        const bool even = product.begin == nullptr;
        const std::size_t from = even ? count * t / tiles : t * product.tile_rows;
        const std::size_t to = even ? count * (t + 1) / tiles : std::min(count, from + product.tile_rows);
        Tile tile = rows.tile(begin + from, unit);
        tile.panel = panel;
        tile.panel_scales = nibbles_here.scales;
        tile.zeros = nibbles_here.zeros;
        tile.units = some;
        tile.sums = sums + from * stride + (p - first) * kColumns;
        tile.sum_stride = stride;
        tile.onto = unit > 0;
        product.multiply(tile, to - from);
      }
    }
  }
  if (product.end != nullptr) product.end();
}

std::size_t Matrix::piece_panels(std::size_t rows, std::size_t threads) const {
  constexpr std::size_t kFewRows = 32, kPiecesOfThread = 4, kPanels = 8;
  if (rows > kFewRows) return kPanels;
  // Few rows: each piece reads as much memory in one go as leaves every thread a few of them.
  return std::max<std::size_t>(1, parts_of(panels(), threads * kPiecesOfThread));
}

std::size_t Matrix::pieces(std::size_t rows, std::size_t threads) const {
  return parts_of(rows, kMostPieceRows) * parts_of(panels(), piece_panels(rows, threads));
}

Piece Matrix::piece(std::size_t rows, std::size_t threads, std::size_t number) const {
  const std::size_t blocks = parts_of(rows, kMostPieceRows), width = piece_panels(rows, threads);
  const std::size_t row = number % blocks * kMostPieceRows, panel = number / blocks * width;
  return {row, std::min(kMostPieceRows, rows - row), panel, std::min(width, panels() - panel)};
}

}  // namespace pipeedge::decoder
