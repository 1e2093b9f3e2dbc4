package claim_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
)

// BenchmarkSync measures a pass over bound claims that need no operation. Manifests declare half of
// the volumes.
func BenchmarkSync(b *testing.B) {
	for _, n := range []int{100, 1000, 10000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			f := newFixture(b)
			for i := range n {
				name := fmt.Sprintf("c%d", i)
				v, c := newVolume("v-"+name, "1Gi", ""), newClaim(name, "1Gi", "")
				v.Spec.ClaimRef = &corev1.ObjectReference{Namespace: "default", Name: name, UID: c.UID}
				v.Status.Phase = corev1.VolumeBound
				c.Spec.VolumeName = v.Name
				c.Status.Capacity = v.Spec.Capacity
				if i%2 == 0 {
					v.Annotations = map[string]string{"trivet.dev/manifest": "true"}
					f.objects.Volumes[v.Name] = v
				}
				f.objects.Claims[key(c)] = c
				if err := f.manager.store.Store.PutVolume(v); err != nil {
					b.Fatal(err)
				}
				if err := f.manager.store.Store.PutClaim(c); err != nil {
					b.Fatal(err)
				}
			}
			f.restartAndSettle()
			f.checkBound("c1", "v-c1")
			for b.Loop() {
				f.manager.controller.Sync(b.Context())
			}
		})
	}
}
