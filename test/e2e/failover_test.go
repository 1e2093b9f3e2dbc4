//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// leaseTerm is how long the other replica waits for a leader that ends without a word.
const leaseTerm = 15 * time.Second

// leader is the controller's pod in which csi-provisioner works, empty if in none.
func leader(ctx context.Context) string {
	lease, err := client.CoordinationV1().Leases(namespace).Get(ctx, "csi-trivet-dev", metav1.GetOptions{})
	if err != nil || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

// TestFailover: the leader's pod is deleted time and again while claims are made that
// any node may have: each gets one volume, and the other replica need not wait until a
// lease runs out.
func TestFailover(t *testing.T) {
	ns := newNamespace(t, "failover")
	immediateClass(t)
	waitDriver(t)
	const rounds, claims = 3, 20
	for round := range rounds {
		was := leader(t.Context())
		if was == "" {
			t.Fatal("there is no leader")
		}
		var all []string
		for i := range claims {
			all = append(all, claim(fmt.Sprintf("claim-%d-%d", round, i), "immediate", "32Mi", ""))
		}
		applyText(t, ns, strings.Join(all, "\n---\n"))
		began := time.Now()
		kubectl(t, "-n", namespace, "delete", "pod", was, "--wait=false")
		eventually(t, time.Minute, "another leader", func() (string, bool) {
			now := leader(t.Context())
			return now, now != "" && now != was
		})
		took := time.Since(began)
		t.Logf("the next leader after %v", took.Round(time.Millisecond))
		if took >= leaseTerm {
			t.Errorf("the next leader came after %v: the lease was not given back", took)
		}
		kubectl(t, "-n", namespace, "rollout", "status", "deployment/trivet-controller", "--timeout=3m")
	}
	kubectl(t, "-n", ns, "wait", "pvc", "--all", "--for=jsonpath={.status.phase}=Bound", "--timeout=3m")
	made := 0
	for _, n := range nodes() {
		names, err := n.inPool("volumes")
		must(t, err)
		made += len(names)
	}
	if made != rounds*claims {
		t.Errorf("%d claims, and %d volumes in the pools", rounds*claims, made)
	}
}
