// RUN: not mpmd-opt %s -mpmd-merge-inferred-fragments='merge-sideways=true merge-any-consumer=true' 2>&1 | FileCheck %s --check-prefix=ANY
// RUN: not mpmd-opt %s -mpmd-merge-inferred-fragments='merge-sideways=true clone-inferred-fragments=true' 2>&1 | FileCheck %s --check-prefix=CLONE

// ANY: mpmd-merge-inferred-fragments: merge-sideways excludes merge-any-consumer; run the pass twice instead
// CLONE: mpmd-merge-inferred-fragments: merge-sideways excludes clone-inferred-fragments; run the pass twice instead

!m1 = !mpmd.mesh_tensor<"m1", tensor<4xf32>>

func.func public @main(%a: !m1) -> !m1 attributes {topology = #mpmd.topology<<"m1" : <["x"=2]>>>} {
  %f = mpmd.fragment<mesh="m1", origin=[]> (%a) (%p: tensor<4xf32>) {
    mpmd.return %p : tensor<4xf32>
  } : (!m1) -> !m1
  return %f : !m1
}
