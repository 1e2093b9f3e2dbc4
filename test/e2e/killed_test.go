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

// killTargets contains the processes that TestKilled kills, and the bounds of the random waits before each
// kill.
var killTargets = map[string]struct {
	least, most time.Duration
	find        func() []int
}{
	"drivers of the nodes":      {500 * time.Millisecond, 4 * time.Second, func() []int { return processes(driver, "driver", "--services=node") }},
	"drivers of the controller": {2 * time.Second, 10 * time.Second, func() []int { return processes(driver, "driver", "--services=controller") }},
	leaderTarget:                {10 * time.Second, 30 * time.Second, leaderProcesses},
	"kubelets":                  {5 * time.Second, 20 * time.Second, func() []int { return processes("kubelet") }},
}

// leaderTarget kills all processes that it finds. The other targets kill one of them.
const leaderTarget = "leader with its sidecars"

// driver is the path of the driver in its container.
const driver = "/usr/local/bin/trivet"

// leaderProcesses returns the processes of the driver and the sidecars in the leader's pod.
func leaderProcesses() []int {
	pod, err := client.CoreV1().Pods(namespace).Get(context.Background(), leader(context.Background()), metav1.GetOptions{})
	if err != nil {
		return nil
	}
	all := append(processes(driver, "driver"), processes("/csi-")...)
	return slices.DeleteFunc(all, func(pid int) bool { return !inCgroup(pid, "pod"+string(pod.UID)) })
}

// TestKilled creates and deletes pods while the killTargets are killed at random. Each pod must become ready
// with its data, and nothing may be left of the volumes. After some time nothing is killed: on a slow machine, the
// processes that start again would be killed before they have done their work.
func TestKilled(t *testing.T) {
	ns := newNamespace(t, "killed")
	ctx, stop := context.WithTimeout(t.Context(), *killTime)
	defer stop()
	var killers, workers sync.WaitGroup
	var mu sync.Mutex
	killed := map[string]int{}
	for name, v := range killTargets {
		killers.Go(func() {
			n := killAtRandom(ctx, v.least, v.most, v.find, name == leaderTarget)
			mu.Lock()
			defer mu.Unlock()
			killed[name] = n
		})
	}

	names := make(chan string)
	for range 8 {
		workers.Go(func() {
			for name := range names {
				if err := useClaim(t.Context(), ns, name); err != nil {
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
	killers.Wait()
	t.Logf("%d pods; killed: %v", *pods/2*2, killed)
	for name := range killTargets {
		if killed[name] == 0 {
			t.Errorf("%s: got no kills, want at least one", name)
		}
	}
	waitDriver(t)
}

// useClaim creates a claim with a pod that writes, replaces the pod by one that checks the data, and deletes
// both.
func useClaim(ctx context.Context, ns, name string) error {
	for i, command := range []string{writeToken, checkToken} {
		pod := fmt.Sprintf("%s-%d", name, i)
		manifest := claimPod{name: name, pod: pod, command: command}.manifest()
		for _, step := range [][]string{
			{"apply", "-f", "-"},
			{"wait", "pod", pod, "--for=condition=Ready", "--timeout=10m"},
			{"delete", "pod", pod, "--timeout=10m"},
		} {
			if _, err := tryKubectlInput(ctx, manifest, append([]string{"-n", ns}, step...)...); err != nil {
				return err
			}
		}
	}
	_, err := tryKubectlInput(ctx, "", "-n", ns, "delete", "pvc", name, "--timeout=10m")
	return err
}

// killAtRandom repeatedly waits for a random time between two bounds and kills one of the processes that find
// returns, or all of them. The kubelets and cluster/node.sh restart the processes. It runs until ctx ends, and
// returns the number of kills.
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
			kills += min(1, kill(found...)) // the processes of one moment count as one kill
		}
	}
}
