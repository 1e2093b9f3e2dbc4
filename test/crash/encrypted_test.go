package crash

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"os"
	"slices"

	"github.com/trivet-csi/trivet/backend/backendtest/targets"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/volume"
)

// secrets are the secrets of all calls of the kubelet.
var secrets = map[string]string{volume.SecretPassphrase: "the passphrase of the crash tests"}

// The kinds of rows for encrypted images.
var (
	encryptedExt4 = []kind{{targets.Volume("images-encrypted", "ext4"), "crypt"}}
	encryptedRaw  = []kind{{targets.Volume("images-encrypted", "block"), "crypt-raw"}}
	encrypted     = slices.Concat(encryptedExt4, encryptedRaw)
)

// encryptedRows contains the rows for encrypted images.
var encryptedRows = slices.Concat(
	at(row{call: stage, kinds: encrypted},
		crashpoint.StageAttached, crashpoint.StageFormatting, crashpoint.StageEncrypted, crashpoint.StageOpened, crashpoint.StageErased, crashpoint.StageDone),
	at(row{call: stage, kinds: encryptedExt4}, crashpoint.StageHalfFormat, crashpoint.StageFormatted, crashpoint.StageMarked, crashpoint.StageMounted),
	at(row{call: stage, kinds: encrypted, used: true}, crashpoint.StageAttached, crashpoint.StageOpened),
	at(row{call: publish, kinds: encryptedRaw, used: true, readOnly: true}, crashpoint.PublishReadOnly),
	at(row{call: expand, kinds: encryptedRaw}, crashpoint.GrowImage, crashpoint.GrowRecord),
	at(row{call: nodeExpand, kinds: encryptedRaw}, crashpoint.GrowDevice),
	at(row{call: unpublish, kinds: encryptedRaw, readOnly: true}, crashpoint.UnpublishTarget),
	at(row{call: unstage, kinds: encrypted}, crashpoint.UnstageMount, crashpoint.UnstageGone),
	at(row{call: remove, kinds: encrypted}, crashpoint.DeleteErased, crashpoint.DeleteRenamed),
)

// The kinds of rows for encrypted images on exports.
var (
	exportCryptExt4 = []kind{{targets.Volume("images-nfs-encrypted", "ext4"), "ncrypt"}}
	exportCryptRaw  = []kind{{targets.Volume("images-nfs-encrypted", "block"), "ncrypt-raw"}}
	exportCrypt     = slices.Concat(exportCryptExt4, exportCryptRaw)
)

// exportEncryptedRows contains the rows for encrypted images on exports.
var exportEncryptedRows = slices.Concat(
	at(row{call: stage, kinds: exportCrypt},
		crashpoint.StageAttached, crashpoint.StageFormatting, crashpoint.StageEncrypted, crashpoint.StageOpened, crashpoint.StageErased),
	at(row{call: stage, kinds: exportCryptExt4}, crashpoint.StageFormatted, crashpoint.StageMounted),
	at(row{call: stage, kinds: exportCrypt, used: true}, crashpoint.StageOpened),
	at(row{call: expand, kinds: exportCryptRaw}, crashpoint.GrowImage),
	at(row{call: nodeExpand, kinds: exportCryptRaw}, crashpoint.GrowDevice),
	at(row{call: unstage, kinds: exportCrypt}, crashpoint.UnstageMount, crashpoint.UnstageGone),
	at(row{call: remove, kinds: exportCryptExt4}, crashpoint.DeleteErased, crashpoint.DeleteRenamed),
)

// The kinds of rows for encrypted disks.
var (
	diskCryptXFS = []kind{{targets.Volume("disks-encrypted", "xfs"), "dcrypt"}}
	diskCryptRaw = []kind{{targets.Volume("disks-encrypted", "block"), "dcrypt-raw"}}
	diskCrypt    = slices.Concat(diskCryptXFS, diskCryptRaw)
)

// diskEncryptedRows contains the rows for encrypted disks.
var diskEncryptedRows = slices.Concat(
	at(row{call: create, kinds: diskCryptXFS}, crashpoint.ClaimMarked),
	at(row{call: stage, kinds: diskCrypt},
		crashpoint.StageAttached, crashpoint.StageFormatting, crashpoint.StageEncrypted, crashpoint.StageOpened, crashpoint.StageErased, crashpoint.StageNoted),
	at(row{call: stage, kinds: diskCryptXFS}, crashpoint.StageHalfFormat, crashpoint.StageFormatted, crashpoint.StageMarked, crashpoint.StageMounted),
	at(row{call: stage, kinds: diskCrypt, used: true}, crashpoint.StageOpened),
	at(row{call: publish, kinds: diskCryptRaw, used: true, readOnly: true}, crashpoint.PublishReadOnly),
	at(row{call: expand, kinds: diskCrypt}, crashpoint.GrowBackup, crashpoint.GrowImage),
	at(row{call: nodeExpand, kinds: diskCrypt}, crashpoint.GrowDevice),
	at(row{call: unstage, kinds: diskCrypt}, crashpoint.UnstageMount, crashpoint.UnstageGone),
	at(row{call: remove, kinds: diskCrypt}, crashpoint.DeleteRenamed, crashpoint.DeleteErased),
	at(row{call: remove, kinds: diskCryptXFS}, crashpoint.ReapZeroed),
)

// mappedNode returns the device node of an encrypted volume's mapped device. It fails unless the node exists.
func (c *co) mappedNode() (string, error) {
	text := c.id
	if c.host.shared() {
		text += "@" + nodeID
	}
	sum := sha256.Sum256([]byte(text))
	node := "/dev/trivet/trivet-" + hex.EncodeToString(sum[:20])
	if _, err := os.Stat(node); err != nil {
		return "", fmt.Errorf("the volume is staged: %w", err)
	}
	return node, nil
}
