package backendtest

import (
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/driver"
)

// testInlineVolume: an inline volume exists from publish to unpublish, and keeps its content when the driver
// restarts.
func testInlineVolume(t *testing.T, _ *Driver, kind Kind) {
	d := kind.start(t, "20G", func(o *driver.Options) { o.Config.Pools[0].Ephemeral = true })
	l := &testVolume{d: d, kind: kind, id: "csi-" + strings.Repeat("0f", 32), target: filepath.Join(t.TempDir(), "target")}
	publish := func() error {
		_, err := d.Node.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{
			VolumeId: l.id, TargetPath: l.target, VolumeCapability: kind.Capability(multiWriter),
			VolumeContext: map[string]string{"csi.storage.k8s.io/ephemeral": "true", "csi.storage.k8s.io/pod.name": "p", "size": "320Mi"},
		})
		return err
	}
	must(t, publish())
	write(t, l.data(l.target), pattern(120))
	d.Restart(t)
	must(t, publish())
	wantContent(t, l.data(l.target), pattern(120))
	for range 2 {
		must(t, l.unpublishAt(t.Context(), l.target))
	}
	d.wantEmpty(t)
}
