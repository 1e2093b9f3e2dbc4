//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// leaseTerm is the time after which another replica takes over from a leader that has not released its
// lease.
const leaseTerm = 15 * time.Second

// leader returns the controller's pod whose csi-provisioner holds the lease, or an empty string.
func leader(ctx context.Context) string {
	lease, err := client.CoordinationV1().Leases(namespace).Get(ctx, "csi-trivet-dev", metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// TestFailover repeatedly deletes the leader's pod while claims are created that fit any node. Each claim must
// get exactly one volume, and the other replica must take over before the lease would expire.
func TestFailover(t *testing.T) {
	ns := newNamespace(t, "failover")
	immediateClass(t)
	waitDriver(t)
	const rounds, claims = 3, 20
	for round := range rounds {
		old := leader(t.Context())
		if old == "" {
			t.Fatal("got no leader, want one")
		}
		var all []string
		for i := range claims {
			all = append(all, claim(fmt.Sprintf("claim-%d-%d", round, i), "immediate", "32Mi", ""))
		}
		applyText(t, ns, strings.Join(all, "\n---\n"))
		began := time.Now()
		kubectl(t, "-n", namespace, "delete", "pod", old, "--wait=false")
		eventually(t, time.Minute, "another pod is the leader", func() (string, bool) {
			now := leader(t.Context())
			return now, now != "" && now != old
		})
		took := time.Since(began)
		t.Logf("another pod was the leader after %v", took.Round(time.Millisecond))
		if took >= leaseTerm {
			t.Errorf("got another leader after %v, want less than %v because the leader releases its lease", took, leaseTerm)
		}
		kubectl(t, "-n", namespace, "rollout", "status", "deployment/trivet-controller", "--timeout=3m")
	}
	kubectl(t, "-n", ns, "wait", "pvc", "--all", "--for=jsonpath={.status.phase}=Bound", "--timeout=3m")
	created := 0
	for _, n := range nodes() {
		volumes, err := os.ReadDir(n.path(defaultPool + "/volumes"))
		must(t, err)
		created += len(volumes)
	}
	if created != rounds*claims {
		t.Errorf("got %d volumes in the pools, want %d as claims", created, rounds*claims)
	}
}
