package flexvolume

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/trivet-csi/trivet/test/frozen"
	"github.com/trivet-csi/trivet/volumemanager/plugins"
	"github.com/trivet-csi/trivet/volumemanager/plugins/plugintest"
)

// TestFrozenAttachments: a volume that an earlier version attached is detached by its record.
func TestFrozenAttachments(t *testing.T) {
	name := "pv"
	r := plugins.NewAttachment(plugintest.NewHost("/root"), name, "trivet/trivet", corev1.PersistentVolumeSource{
		FlexVolume: &corev1.FlexPersistentVolumeSource{
			Driver: "trivet/trivet", FSType: "ext4", ReadOnly: true, Options: map[string]string{"size": "1Gi"},
			SecretRef: &corev1.SecretReference{Name: "s", Namespace: "n"},
		},
	})
	r.Spec.Source.PersistentVolumeName = &name
	r.Status.Attached, r.Status.AttachmentMetadata = true, map[string]string{deviceKey: "/dev/sda"}
	frozen.JSON[*storagev1.VolumeAttachment]("attachments").Test(t, map[string]*storagev1.VolumeAttachment{"attached": r})
}
