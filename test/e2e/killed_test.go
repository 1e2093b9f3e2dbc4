//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"
)

// claimAndPod is a pod with a volume of its own, ready when the token is in it and
// durable: the first pod writes it, the second finds it.
const claimAndPod = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %[1]s}
spec:
  storageClassName: trivet-loop
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 32Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: %[1]s-%[2]s}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sh, -c, '%[3]s && touch /tmp/ready && sleep 1000000']
    readinessProbe: {exec: {command: [cat, /tmp/ready]}, periodSeconds: 1}
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: %[1]s}}]
`

const (
	writes = `echo %[1]s >/data/token && sync /data/token`
	finds  = `test "$(cat /data/token)" = %[1]s`
)

// TestKilled creates and deletes pods while driver and kubelet are killed at random: each pod comes up, with its data, and nothing is left.
func TestKilled(t *testing.T) {
	ns := newNamespace(t, "killed")
	ctx, stop := context.WithCancel(t.Context())
	var wreckers, workers sync.WaitGroup
	var drivers, kubelets int
	wreckers.Go(func() { drivers = killAtRandom(ctx, 500*time.Millisecond, 4500*time.Millisecond, driverCommand...) })
	wreckers.Go(func() { kubelets = killAtRandom(ctx, 5*time.Second, 30*time.Second, "kubelet") })

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
	t.Logf("%d pods, the driver killed %d times, the kubelet %d times", *pods/2*2, drivers, kubelets)
	if drivers == 0 || kubelets == 0 {
		t.Error("nobody was killed: nothing was tested")
	}
	waitDriver(t)
}

// wholeLife is one claim's: a pod that writes, a pod that finds, and all deleted.
func wholeLife(ctx context.Context, ns, name string) error {
	for i, command := range []string{writes, finds} {
		pod := fmt.Sprintf("%s-%d", name, i)
		manifest := fmt.Sprintf(claimAndPod, name, fmt.Sprint(i), strings.ReplaceAll(fmt.Sprintf(command, name), "'", "''"))
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

// killAtRandom kills a program, which somebody starts again, after waits between
// two bounds, until ctx ends. It returns how often.
func killAtRandom(ctx context.Context, least, most time.Duration, words ...string) int {
	kills := 0
	for {
		select {
		case <-ctx.Done():
			return kills
		case <-time.After(least + rand.N(most-least)):
			if kill(words...) {
				kills++
			}
		}
	}
}
