//go:build vm

package crash

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/backend/backendtest"
	"github.com/trivet-csi/trivet/backend/lvm"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestThinKilledInTransfer is TestKilledInTransfer for logical volumes, which have no differences. Afterwards, no logical volume is
// left.
func TestThinKilledInTransfer(t *testing.T) {
	for _, p := range append([]crashpoint.Point{crashpoint.CreateImage}, receivePoints...) {
		for _, undone := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/undone=%t", p, undone), func(t *testing.T) {
				killInTransfer(t, p, undone, false, newThinPool(t), newThinPool(t))
			})
		}
	}
}

// TestThinKilledSender kills the driver that sends a volume, which has taken a snapshot for that. When it has started again, the
// snapshot is removed, and no logical volume is active.
func TestThinKilledSender(t *testing.T) {
	a, b, controller := newMembers(t, newThinPool(t), newThinPool(t))
	slow := fmt.Sprintf("pools: [%s]\nforwarding: {listen: %q}\ntransferLimit: {bytesPerSecond: 1Mi}\n", a.pool.config(), a.address)
	must(t, os.WriteFile(filepath.Join(a.dir, "config.yaml"), []byte(slow), 0o600))
	a.start(t, "")
	b.start(t, "")
	controller.start(t, "")
	id, err := controller.create(t, "v", "a", nil)
	must(t, err)
	content := make([]byte, 8<<20)
	_, _ = rand.Read(content)
	a.pool.write(t, "v", content)
	from := &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Volume{Volume: &csi.VolumeContentSource_VolumeSource{VolumeId: id}}}
	answered := make(chan error, 1)
	go func() {
		_, err := controller.create(t, "n", "b", from)
		answered <- err
	}()
	isSnapshot := func(lv []string) bool { return strings.Contains(lv[2], "trivet.snapshot") }
	isActive := func(lv []string) bool { return lv[1] == "active" }
	must(t, poll(func(context.Context) error {
		if !slices.ContainsFunc(logicalVolumes(t, a.pool), func(lv []string) bool { return isSnapshot(lv) && isActive(lv) }) {
			return errors.New("no snapshot is being sent")
		}
		return nil
	}))
	must(t, a.process.cmd.Process.Kill())
	<-a.process.dead
	a.start(t, "")
	must(t, <-answered)
	tmp := filepath.Join(a.records(), ".trivet", "tmp")
	must(t, poll(func(context.Context) error {
		for _, lv := range logicalVolumes(t, a.pool) {
			if isSnapshot(lv) || slices.Contains(strings.Split(lv[2], ","), "trivet.volume.v") && isActive(lv) {
				return fmt.Errorf("got the snapshot or active logical volume %q, want none", lv)
			}
		}
		return emptyDir(tmp)
	}))
}

// TestThickKilledInTransfer is TestThinKilledInTransfer for logical volumes without a thin pool.
func TestThickKilledInTransfer(t *testing.T) {
	killInTransferTo(t, func(t *testing.T) (a, b transferPool) { return newThickPool(t), newThickPool(t) })
}

// logicalVolumes returns the name, "active" or nothing, and the tags of each logical volume of a pool.
func logicalVolumes(t *testing.T, p transferPool) (found [][]string) {
	t.Helper()
	out := testenv.Run(t, "lvm", "lvs", "--noheadings", "--separator", ";", "-o", "lv_name,lv_active,lv_tags", p.group.VolumeGroup)
	for line := range strings.Lines(out) {
		found = append(found, strings.Split(strings.TrimSpace(line), ";"))
	}
	return found
}

func newThickPool(t *testing.T) transferPool {
	t.Helper()
	return transferPool{group: backendtest.OnGroup(t, backendtest.Room{}).Config.Section.(*lvm.Group)}
}

func newThinPool(t *testing.T) transferPool {
	t.Helper()
	return transferPool{group: backendtest.OnThinPool(t, backendtest.Room{}).Config.Section.(*lvm.Group)}
}
