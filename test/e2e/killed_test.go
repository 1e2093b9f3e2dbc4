//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// victims are who is killed in TestKilled, and after which waits.
var victims = map[string]struct {
	least, most time.Duration
	find        func() []int
}{
	"nodes' drivers":       {500 * time.Millisecond, 4 * time.Second, func() []int { return processes(driver, "driver", "--services=node") }},
	"controllers' drivers": {2 * time.Second, 10 * time.Second, func() []int { return processes(driver, "driver", "--services=controller") }},
	"the leader's all":     {10 * time.Second, 30 * time.Second, leading},
	"kubelets":             {5 * time.Second, 20 * time.Second, func() []int { return processes("kubelet") }},
}

const driver = "/usr/local/bin/trivet"

// leading are driver and sidecars of the pod in which csi-provisioner works.
func leading() []int {
	pod, err := client.CoreV1().Pods(namespace).Get(context.Background(), leader(context.Background()), metav1.GetOptions{})
	if err != nil {
		return nil
	}
	all := append(processes(driver, "driver"), processes("/csi-")...)
	return slices.DeleteFunc(all, func(pid int) bool { return !inGroup(pid, "pod"+string(pod.UID)) })
}

// TestKilled creates and deletes pods while the drivers of nodes and controllers, the
// controller's leader with its sidecars, and the kubelets are killed at random: each
// pod comes up, with its data, and nothing is left.
func TestKilled(t *testing.T) {
	ns := newNamespace(t, "killed")
	ctx, stop := context.WithCancel(t.Context())
	var wreckers, workers sync.WaitGroup
	var mu sync.Mutex
	killed := map[string]int{}
	for name, v := range victims {
		wreckers.Go(func() {
			n := killAtRandom(ctx, v.least, v.most, v.find, name == "the leader's all")
			mu.Lock()
			defer mu.Unlock()
			killed[name] = n
		})
	}

	names := make(chan string)
	for range 8 {
		workers.Go(func() {
			for name := range names {
				if err := wholeLife(t.Context(), ns, name); err != nil {
					t.Errorf("%s: %v", name, err)
				}
			}
		})
	}
	for i := range *pods / 2 { // each claim has two pods, one after the other
		names <- fmt.Sprintf("claim-%d", i)
	}
	close(names)
	workers.Wait()
	stop()
	wreckers.Wait()
	t.Logf("%d pods; killed: %v", *pods/2*2, killed)
	for name := range victims {
		if killed[name] == 0 {
			t.Errorf("none of %s was killed: nothing was tested", name)
		}
	}
	waitDriver(t)
}

// wholeLife is one claim's: a pod that writes, a pod that finds, and all deleted.
func wholeLife(ctx context.Context, ns, name string) error {
	for i, command := range []string{writes, finds} {
		pod := fmt.Sprintf("%s-%d", name, i)
		manifest := tenant{name: name, pod: pod, does: command}.manifest()
		for _, step := range [][]string{
			{"apply", "-f", "-"},
			{"wait", "pod", pod, "--for=condition=Ready", "--timeout=5m"},
			{"delete", "pod", pod, "--timeout=5m"},
		} {
			if _, err := feed(ctx, manifest, append([]string{"-n", ns}, step...)...); err != nil {
				return err
			}
		}
	}
	_, err := feed(ctx, "", "-n", ns, "delete", "pvc", name, "--timeout=5m")
	return err
}

// killAtRandom kills one of the found processes, or all of them, after random waits between two
// bounds, until ctx ends. Their supervisors start them again. It returns the number of kills.
func killAtRandom(ctx context.Context, least, most time.Duration, find func() []int, all bool) int {
	kills := 0
	for {
		select {
		case <-ctx.Done():
			return kills
		case <-time.After(least + rand.N(most-least)):
			found := find()
			if !all && len(found) > 0 {
				found = []int{found[rand.N(len(found))]}
			}
			kills += min(1, kill(found...))
		}
	}
}
