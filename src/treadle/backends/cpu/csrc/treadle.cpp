// The library's entry points, called through ctypes. Pointers are raw; sizes are checked by the caller.
//
// A step is one call of treadle_forward, then treadle_logits for the tokens whose logits are needed.
#include "sample.h"
#include "step.h"

using namespace treadle;

namespace {

// A size or a constant that treadle.backends.cpu.library mirrors by hand.
struct AbiEntry {
  const char* name;
  int64_t value;
};

#define TREADLE_SIZE(type) {"sizeof " #type, int64_t(sizeof(type))}

constexpr AbiEntry ABI[] = {
    {"PANEL", PANEL}, {"GROUP", GROUP}, {"BLOCK_GROUP", BLOCK_GROUP}, {"CELL", CELL},
    {"MAX_HEAD_DIM", MAX_DIM}, {"MAX_GROUP_SIZE", MAX_ROWS},
    TREADLE_SIZE(Weights), TREADLE_SIZE(Layer), TREADLE_SIZE(Model), TREADLE_SIZE(KVCache), TREADLE_SIZE(Step),
    TREADLE_SIZE(Draws), TREADLE_SIZE(Reports), TREADLE_SIZE(Penalties),
    {nullptr, 0},
};

// 0, or 1 if an allocation failed: an exception must not leave a function that is called from C.
template <class F>
int32_t status_of(const F& f) {
  try {
    f();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

}  // namespace

extern "C" {

// Sizes and constants, up to an entry without a name. Python compares them with its own when it loads the library.
const AbiEntry* treadle_abi() { return ABI; }

// Packing

// Bytes of a packed matrix [rows, columns].
int64_t treadle_matrix_bytes(int32_t format, int32_t rows, int32_t columns) {
  return int64_t(round_up(rows, PANEL) / PANEL * panel_bytes(format, int(round_up(columns, GROUP))));
}

// source: floats [rows, columns] for bfloat16 and int8, else the file's blocks; data: zeros of treadle_matrix_bytes.
// Returns the number of groups whose scale is not finite.
int64_t treadle_pack(int32_t format, const void* source, int32_t rows, int32_t columns, void* data, int32_t threads) {
  return pack(Format(format), source, rows, columns, static_cast<char*>(data), threads);
}

// The engine

// Null if an allocation failed.
void* treadle_create(const Model* model, const KVCache* kv) {
  Engine* engine = nullptr;
  status_of([&] { engine = new Engine(*model, *kv); });
  return engine;
}

void treadle_destroy(void* engine) { delete static_cast<Engine*>(engine); }

int32_t treadle_forward(void* engine, const Step* step) {
  return status_of([&] { static_cast<Engine*>(engine)->forward(*step); });
}

int32_t treadle_logits(void* engine, const int32_t* tokens, int32_t count, const int32_t* place, float* out,
                       int32_t* best_ids, int32_t threads) {
  return status_of([&] { static_cast<Engine*>(engine)->logits(tokens, count, place, out, best_ids, threads); });
}

int64_t treadle_block_bytes(const KVCache* kv) { return kv->block_bytes(); }

// Sampling

int32_t treadle_draw(const Draws* draws) {
  return status_of([&] { draw_rows(*draws); });
}
int32_t treadle_report(const Reports* reports) {
  return status_of([&] { report_rows(*reports); });
}
int32_t treadle_penalize(const Penalties* penalties) {
  return status_of([&] { penalize_rows(*penalties); });
}

}  // extern "C"
