package csi

import (
	"os"
	"path/filepath"
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// TestFrozenRecords: a volume that an earlier version mounted is unmounted by its record.
func TestFrozenRecords(t *testing.T) {
	dir := t.TempDir()
	frozen.Format[record]{
		Dir: "records",
		Read: func(b []byte) (record, error) {
			if err := os.WriteFile(filepath.Join(dir, recordFile), b, 0o600); err != nil {
				return record{}, err
			}
			return readRecord(dir)
		},
		Write: func(r record) ([]byte, error) {
			if err := atomicfile.WriteJSON(dir, recordFile, r); err != nil {
				return nil, err
			}
			return os.ReadFile(filepath.Join(dir, recordFile))
		},
	}.Test(t, map[string]record{
		"persistent": {
			Name: "pv", Handle: "loop:ssd.0a1b2c3d:v", Driver: "csi.trivet.dev", Node: "node-1", Attachment: attachmentName("loop:ssd.0a1b2c3d:v", "csi.trivet.dev", "node-1"),
			Lifecycle: storagev1.VolumeLifecyclePersistent, FSGroup: "1000",
		},
		"inline": {Name: "v", Handle: "csi-" + hash("v"), Driver: "csi.trivet.dev", Node: "node-1", Lifecycle: storagev1.VolumeLifecycleEphemeral, Source: hash("source")},
	})
}

// TestFrozenAttachments: a volume that an earlier version attached is detached by its record.
func TestFrozenAttachments(t *testing.T) {
	a := plugins.NewAttachment(plugintest.NewHost("/root"), "csi-"+hash("v"), "csi.trivet.dev", corev1.PersistentVolumeSource{
		CSI: &corev1.CSIPersistentVolumeSource{Driver: "csi.trivet.dev", VolumeHandle: "loop:ssd.0a1b2c3d:v", FSType: "ext4", VolumeAttributes: map[string]string{"pool": "ssd"}},
	})
	a.Annotations = map[string]string{nodeIDAnnotation: "node-1"}
	a.Status.Attached, a.Status.AttachmentMetadata = true, map[string]string{"key": "value"}
	frozen.JSON[*storagev1.VolumeAttachment]("attachments").Test(t, map[string]*storagev1.VolumeAttachment{"attached": a})
}

// TestFrozenPaths: staging mounts, published devices and records keep their paths.
func TestFrozenPaths(t *testing.T) {
	p := &Plugin{host: plugintest.NewHost("/root")}
	v := &volume{driver: "csi.trivet.dev", handle: "loop:ssd.0a1b2c3d:v", name: "pv"}
	staging, data := p.stagingPaths(v)
	frozen.List(t, "paths", []string{
		staging, filepath.Join(data, recordFile), p.stagedDevice("pv"), p.publishedDevice("pv", "uid"), p.boundDevice("pv", "uid"), p.deviceData("pv"),
		p.podDir("uid", "pv"), filepath.Join(p.attachmentsDir(), p.attachmentFile(v)),
	})
}
