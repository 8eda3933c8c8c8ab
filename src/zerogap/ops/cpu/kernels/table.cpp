// Every op of this build, by name. The order is of no account: ops/cpu/library.py asks for names and sizes.
#include "attention.h"
#include "activation.h"
#include "columns.h"
#include "digest.h"
#include "embedding.h"
#include "moe.h"
#include "mla.h"
#include "norm.h"
#include "optim.h"
#include "product.h"
#include "quant.h"
#include "rope.h"
#include "sampling.h"

namespace zg {

const OpEntry OPS[] = {
    {"product", run_product, sizeof(ProductArgs)},
    {"grouped_product", run_grouped_product, sizeof(GroupedArgs)},
    {"finish", run_finish, sizeof(FinishArgs)},
    {"weight_grad", run_weight_grad, sizeof(WeightGradArgs)},
    {"column_grad", run_column_grad, sizeof(ColumnGradArgs)},
    {"pack", run_pack, sizeof(PackArgs)},
    {"unpack", run_unpack, sizeof(UnpackArgs)},
    {"block_scales", run_block_scales, sizeof(BlockScalesArgs)},
    {"encode", run_encode, sizeof(EncodeArgs)},
    {"decode", run_decode, sizeof(DecodeArgs)},
    {"quantise_rows", run_quantise_rows, sizeof(QuantiseRowsArgs)},
    {"quantise_weight", run_quantise_weight, sizeof(QuantiseWeightArgs)},
    {"pack_codes", run_pack_codes, sizeof(PackCodesArgs)},
    {"unpack_codes", run_unpack_codes, sizeof(UnpackCodesArgs)},
    {"dequantise", run_dequantise, sizeof(DequantiseArgs)},
    {"kv_write", run_kv_write, sizeof(KVWriteArgs)},
    {"kv_amax", run_kv_amax, sizeof(KVAmaxArgs)},
    {"attention", run_attention, sizeof(AttentionArgs)},
    {"attention_grad", run_attention_grad, sizeof(AttentionGradArgs)},
    {"latent_write", run_latent_write, sizeof(LatentWriteArgs)},
    {"latent_amax", run_latent_amax, sizeof(LatentAmaxArgs)},
    {"latent_attention", run_latent_attention, sizeof(LatentAttentionArgs)},
    {"latent_grad", run_latent_grad, sizeof(LatentGradArgs)},
    {"norm", run_norm, sizeof(NormArgs)},
    {"norm_grad", run_norm_grad, sizeof(NormGradArgs)},
    {"rope", run_rope, sizeof(RopeArgs)},
    {"rope_table", run_rope_table, sizeof(RopeTableArgs)},
    {"silu_mul", run_silu_mul, sizeof(SiluMulArgs)},
    {"silu_mul_grad", run_silu_mul_grad, sizeof(SiluMulGradArgs)},
    {"route", run_route, sizeof(RouteArgs)},
    {"dispatch", run_dispatch, sizeof(DispatchArgs)},
    {"spread", run_spread, sizeof(SpreadArgs)},
    {"combine", run_combine, sizeof(CombineArgs)},
    {"combine_grad", run_combine_grad, sizeof(CombineGradArgs)},
    {"route_grad", run_route_grad, sizeof(RouteGradArgs)},
    {"gather_sum", run_gather_sum, sizeof(GatherSumArgs)},
    {"gather", run_gather, sizeof(GatherArgs)},
    {"scatter", run_scatter, sizeof(ScatterArgs)},
    {"embedding_grad", run_embedding_grad, sizeof(EmbeddingGradArgs)},
    {"adamw", run_adamw, sizeof(AdamWArgs)},
    {"square_sums", run_square_sums, sizeof(SquareSumsArgs)},
    {"add", run_add, sizeof(AddArgs)},
    {"copy_columns", run_copy_columns, sizeof(CopyColumnsArgs)},
    {"digest", run_digest, sizeof(DigestArgs)},
    {"logprob", run_logprob, sizeof(LogprobArgs)},
    {"logprob_grad", run_logprob_grad, sizeof(LogprobGradArgs)},
    {"sample", run_sample, sizeof(SampleArgs)},
    {"philox", run_philox, sizeof(PhiloxArgs)},
};
const int NUM_OPS = sizeof(OPS) / sizeof(OPS[0]);

}  // namespace zg
