package flexvolume_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"time"

	"github.com/trivet-csi/trivet/flexvolume"
	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/linux/mount"
)

// testKilled: calls are killed at any moment, and repeated or forgotten; what was
// written is there, no pod has what it did not ask for, no volume is without its
// namespace, and nothing stays in the end.
func testKilled(t *testing.T, binary string) {
	k := newKubelet(t, binary, testenv.Filesystem(t, "xfs", "2G"))
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	h := &history{kubelet: k, rand: rand.New(rand.NewPCG(seed, 0)), mounted: map[string]string{}, written: map[string]string{}}
	for range 60 {
		h.step()
	}
	for pod := range h.mounted {
		h.unmount(pod)
	}
	k.succeed("loop", "init") // what was killed and forgotten
	for volume := range h.written {
		k.refuse(`belongs to namespace "shop"`, "loop", "mount", k.target("thief"), options("volume", volume, "kubernetes.io/pod.namespace", "thief"))
	}
}

// history is what pods have and have written.
type history struct {
	*kubelet
	rand    *rand.Rand
	mounted map[string]string // the volume of each pod
	written map[string]string // what was last written to each volume
}

func (h *history) step() {
	pod := fmt.Sprint("pod", h.rand.IntN(4))
	if _, has := h.mounted[pod]; has {
		h.unmount(pod)
		return
	}
	volume := fmt.Sprint("v", h.rand.IntN(2))
	at := h.target(pod)
	if !h.until("mount", at, options("size", "32Mi", "volume", volume)) {
		h.checkGone(at)
		return
	}
	h.mounted[pod] = volume
	file := filepath.Join(at, "file")
	if text, ok := h.written[volume]; ok {
		h.read(file, text)
	}
	text := fmt.Sprint(h.rand.Int64())
	h.write(file, text)
	h.written[volume] = text
}

func (h *history) unmount(pod string) {
	at := h.target(pod)
	for !h.until("unmount", at) {
	}
	h.checkGone(at)
	delete(h.mounted, pod)
}

func (h *history) checkGone(at string) {
	h.t.Helper()
	if e, err := mount.OnPath(at); e != nil || err != nil {
		h.until("unmount", at) // as a kubelet does that starts again
	}
	if e, err := mount.OnPath(at); e != nil || err != nil {
		h.t.Errorf("%s has %v, %v", at, e, err)
	}
}

// until kills a call some times, and tells whether it was done at last.
func (h *history) until(words ...string) bool {
	for range h.rand.IntN(4) {
		if h.kill(words...) {
			return true
		}
		if h.rand.IntN(4) == 0 {
			return false
		}
	}
	h.succeed("loop", words...)
	return true
}

// kill makes a call and kills it after a while, unless it was done before.
func (h *history) kill(words ...string) bool {
	h.t.Helper()
	c := h.command("loop", words...)
	out, err := c.StdoutPipe()
	must(h.t, err)
	must(h.t, c.Start())
	timer := time.AfterFunc(time.Duration(h.rand.IntN(80))*time.Millisecond, func() { _ = c.Process.Kill() })
	defer timer.Stop()
	var a flexvolume.Answer
	decoded := json.NewDecoder(out).Decode(&a)
	_ = c.Wait()
	if decoded == nil && a.Status != flexvolume.Success {
		h.t.Errorf("%q: %+v", words, a)
	}
	return decoded == nil && a.Status == flexvolume.Success
}
