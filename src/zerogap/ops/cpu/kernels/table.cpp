// Every op of this build, by name. The order is of no account: ops/cpu/library.py asks for names and sizes.
#include "attention.h"
#include "product.h"

namespace zg {

const OpEntry OPS[] = {
    {"product", run_product, sizeof(ProductArgs)},
    {"finish", run_finish, sizeof(FinishArgs)},
    {"weight_grad", run_weight_grad, sizeof(WeightGradArgs)},
    {"column_grad", run_column_grad, sizeof(ColumnGradArgs)},
    {"pack", run_pack, sizeof(PackArgs)},
    {"unpack", run_unpack, sizeof(UnpackArgs)},
    {"kv_write", run_kv_write, sizeof(KVWriteArgs)},
    {"attention", run_attention, sizeof(AttentionArgs)},
    {"attention_grad", run_attention_grad, sizeof(AttentionGradArgs)},
};
const int NUM_OPS = sizeof(OPS) / sizeof(OPS[0]);

}  // namespace zg
