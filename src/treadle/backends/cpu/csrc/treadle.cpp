// The library's entry points, called through ctypes. Pointers are raw; sizes are checked by the caller.
//
// A step is one call of treadle_forward, then treadle_logits for the tokens whose logits somebody wants.
#include "sample.h"
#include "step.h"

using namespace treadle;

extern "C" {

// Packing

void treadle_pack_bf16(const float* source, int32_t rows, int32_t columns, void* data) {
  pack_bf16(source, rows, columns, static_cast<bf16*>(data));
}

void treadle_pack_int8(const float* source, int32_t rows, int32_t columns, void* data, float* scales) {
  pack_int8(source, rows, columns, static_cast<int8_t*>(data), scales);
}

// The engine

void* treadle_create(const Model* model, const KVCache* kv) { return new Engine(*model, *kv); }

void treadle_destroy(void* engine) { delete static_cast<Engine*>(engine); }

void treadle_forward(void* engine, const Step* step) { static_cast<Engine*>(engine)->forward(*step); }

void treadle_logits(void* engine, const int32_t* tokens, int32_t count, const int32_t* place, float* out,
                    int32_t* best_ids, int32_t threads) {
  static_cast<Engine*>(engine)->logits(tokens, count, place, out, best_ids, threads);
}

int64_t treadle_block_bytes(const KVCache* kv) { return kv->block_bytes(); }

// Sampling

void treadle_draw(const Draws* draws) { draw_rows(*draws); }
void treadle_report(const Reports* reports) { report_rows(*reports); }
void treadle_penalize(const Penalties* penalties) { penalize_rows(*penalties); }

}  // extern "C"
