package backendtest

import (
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/trivet-csi/trivet/volume"
)

// testSecrets: the secrets of requests are not logged, even at the highest verbosity and in errors.
func testSecrets(t *testing.T, d *Driver, kind Kind) {
	const secret = "hunter2-horse-battery"
	secrets := map[string]string{"password": secret, volume.SecretPassphrase: secret}
	ctx := t.Context()
	l := newVolume(t, d, kind, multiWriter)
	l.secrets = secrets
	name := newName(t)
	for _, parameters := range []map[string]string{kind.Parameters(), {"wrong": "parameter"}} {
		_, _ = d.Control.CreateVolume(ctx, &csi.CreateVolumeRequest{
			Name: name, VolumeCapabilities: []*csi.VolumeCapability{l.cap}, Secrets: secrets, Parameters: parameters,
		})
	}
	must(t, l.publishTo(ctx, Node))
	l.stageAndPublish(t)
	_, _ = l.expand(ctx, gib)
	_, _ = d.Node.NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{VolumeId: l.id, VolumePath: l.target, Secrets: secrets})
	_, _ = d.Node.NodeGetStorageHealth(ctx, &csi.NodeGetStorageHealthRequest{Secrets: secrets})
	_, _ = d.Control.ControllerGetVolumeHealth(ctx, &csi.ControllerGetVolumeHealthRequest{VolumeId: l.id, Secrets: secrets})
	_, _ = d.Control.ControllerListVolumeHealth(ctx, &csi.ControllerListVolumeHealthRequest{Secrets: secrets})
	_, _ = d.Control.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: l.id, VolumeCapabilities: []*csi.VolumeCapability{l.cap}, Secrets: secrets,
	})
	_, _ = d.Control.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: l.id, Secrets: secrets})
	for _, id := range []string{"no-such-volume", volumeNamed(t, d, name, kind, l.cap)} {
		_, err := d.Control.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id, Secrets: secrets})
		must(t, err)
	}
	log := Log()
	if !strings.Contains(log, name) || !strings.Contains(log, `stripped`) {
		t.Fatal("the log does not contain the requests of this test, so the test is not valid")
	}
	if strings.Contains(log, secret) {
		t.Error("the log contains a secret")
	}
}
