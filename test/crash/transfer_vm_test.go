//go:build vm

package crash

import (
	"context"
	"crypto/rand"
	"crypto/x509"
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
	"github.com/trivet-csi/trivet/cluster/pki"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/internal/testenv"
)

// TestThinKilledInTransfer is TestKilledInTransfer for logical volumes, which have no differences. Afterwards, no logical volume is
// left.
func TestThinKilledInTransfer(t *testing.T) {
	for _, p := range slices.Concat([]crashpoint.Point{crashpoint.CreateImage, crashpoint.ReceiveAbandoned}, transferPoints) {
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
	c := backendtest.NewCluster(t)
	a, b := newNode(t, c, "a", newThinPool(t)), newNode(t, c, "b", newThinPool(t))
	config := fmt.Sprintf("forwarding: {nodes: [{name: a, address: %q}, {name: b, address: %q}]}\n", a.address, b.address)
	controller := newMember(t, c, pki.ControllerURI(backendtest.DriverName), x509.ExtKeyUsageClientAuth, config, "--services", "controller")
	slow := fmt.Sprintf("pools: [%s]\nforwarding: {listen: %q}\ntransferLimit: {bytesPerSecond: 1Mi}\n", a.pool.config(), a.address)
	must(t, os.WriteFile(filepath.Join(a.dir, "config.yaml"), []byte(slow), 0o600))
	a.start(t, "")
	b.start(t, "")
	controller.pool = b.pool
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
	volumes := func(selection string) []string {
		return strings.Fields(testenv.Run(t, "lvm", "lvs", "--noheadings", "-o", "lv_name", "-S", selection, a.pool.group.VolumeGroup))
	}
	must(t, poll(func(context.Context) error {
		if len(volumes("lv_tags=~^trivet.snapshot && lv_active=active")) == 0 {
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
		if got := volumes("lv_tags=~^trivet.snapshot || lv_tags=trivet.volume.v && lv_active=active"); len(got) > 0 {
			return fmt.Errorf("got the snapshots or active logical volumes %q, want none", got)
		}
		return emptyDir(tmp)
	}))
}

func newThinPool(t *testing.T) transferPool {
	t.Helper()
	return transferPool{group: backendtest.OnThinPool(t, backendtest.Room{}).Config.Section.(*lvm.Group)}
}
