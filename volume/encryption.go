package volume

import "slices"

// ParamEncryption is the StorageClass parameter with the type of encryption.
const ParamEncryption = "encryption"

// EncryptionLUKS2 is the only type of encryption. Not encrypted volumes have EncryptionNone.
const (
	EncryptionNone  = "none"
	EncryptionLUKS2 = "luks2"
)

// Encryption is the part of the record that only encrypted volumes have: the settings with which their LUKS2 container was
// created.
type Encryption struct {
	Type   string `json:"type"`
	Cipher string `json:"cipher"`
	// KeySize is in bits, SectorSize in bytes.
	KeySize    int `json:"keySizeBits"`
	SectorSize int `json:"sectorSize"`
	// DataOffset is the size of the header in bytes, by which the storage is larger than the capacity.
	DataOffset int64 `json:"dataOffsetBytes"`
	// Derivation derives the key from the passphrase, with Memory in KiB and Iterations.
	Derivation string `json:"pbkdf"`
	Memory     int    `json:"pbkdfMemoryKiB"`
	Iterations int    `json:"pbkdfIterations"`
}

// overhead returns the size of the header in bytes.
func (e *Encryption) overhead() int64 {
	if e == nil {
		return 0
	}
	return e.DataOffset
}

// kind returns the value of ParamEncryption.
func (e *Encryption) kind() string {
	if e == nil {
		return EncryptionNone
	}
	return e.Type
}

// maxDataOffset limits the size of a header in a record.
const maxDataOffset = 1 * GiB

// check refuses values that no driver wrote.
func (e *Encryption) check() error {
	if e == nil || e.Type == EncryptionLUKS2 && e.Cipher != "" && e.KeySize > 0 && (e.SectorSize == 512 || e.SectorSize == 4096) &&
		e.DataOffset > 0 && e.DataOffset <= maxDataOffset && e.DataOffset%4096 == 0 && e.Derivation != "" && e.Memory >= 0 && e.Iterations > 0 {
		return nil
	}
	return Errorf(ErrDamaged, "record has the invalid encryption %+v", *e)
}

// Encryption returns the value of ParamEncryption.
func (p Parameters) Encryption() string {
	if value := p.Get(ParamEncryption); value != "" {
		return value
	}
	return EncryptionNone
}

// Overhead returns the size of the header of an encrypted volume in bytes; 0 for another volume.
func (v Volume) Overhead() int64 { return v.Encryption.overhead() }

// StorageSize returns the size of the volume's storage in bytes: the capacity, and the header of an encrypted volume.
func (v Volume) StorageSize() int64 { return v.Capacity + v.Overhead() }

// SameEncryption returns ErrInvalid if a copy with the parameters p would have another type of encryption than its source.
func (e *Encryption) SameEncryption(p Parameters, source *Source) error {
	if e.kind() == p.Encryption() {
		return nil
	}
	return Errorf(ErrInvalid, "parameter %s=%s: %v has encryption %s, and a copy has the encryption and the passphrase of its source: use a class with %s: %s", ParamEncryption, p.Encryption(), source, e.kind(), ParamEncryption, e.kind())
}

// Keys of the secrets of a request, and the StorageClass parameters that name the secrets (Kubernetes, external-provisioner).
const (
	SecretPassphrase     = "passphrase"
	SecretPrevious       = "previousPassphrase"
	ParamNodeStageSecret = ProvisionerPrefix + "node-stage-secret-name"
	ParamExpandSecret    = ProvisionerPrefix + "node-expand-secret-name"
)

// Secrets are the secrets of a request. They are never formatted or logged.
type Secrets struct{ values map[string]string }

// NewSecrets returns the secrets of a request.
func NewSecrets(values map[string]string) Secrets { return Secrets{values} }

// String implements fmt.Stringer.
func (Secrets) String() string { return "(secrets)" }

// GoString implements fmt.GoStringer.
func (s Secrets) GoString() string { return s.String() }

// MarshalLog implements logr.Marshaler.
func (s Secrets) MarshalLog() any { return s.String() }

// MarshalText implements encoding.TextMarshaler.
func (s Secrets) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// maxPassphrase is the largest size of a passphrase in bytes.
const maxPassphrase = 4096

// Passphrase returns a copy of the passphrase, which the caller erases. It returns ErrInvalid if there is none; parameter is
// the StorageClass parameter that names the secret.
func (s Secrets) Passphrase(id ID, parameter string) ([]byte, error) {
	value := s.values[SecretPassphrase]
	if len(value) > maxPassphrase || len(s.values[SecretPrevious]) > maxPassphrase {
		return nil, Errorf(ErrInvalid, "secrets: a passphrase of volume %s has more than %d bytes", id, maxPassphrase)
	}
	if value != "" {
		return []byte(value), nil
	}
	return nil, Errorf(ErrInvalid, "secrets: key %q is missing or empty, and volume %s is encrypted: create a Secret with this key, and name it in parameter %s of the StorageClass", SecretPassphrase, id, parameter)
}

// CheckPassphrase returns ErrInvalid if NodeStageVolume has no passphrase for an encrypted volume.
func (s Secrets) CheckPassphrase(id ID) error {
	passphrase, err := s.Passphrase(id, ParamNodeStageSecret)
	clear(passphrase)
	return err
}

// PreviousPassphrase returns a copy of the passphrase that the passphrase replaces; it is empty if there is none.
func (s Secrets) PreviousPassphrase() []byte { return []byte(s.values[SecretPrevious]) }

// encryptionTypes are the values of ParamEncryption.
var encryptionTypes = []string{EncryptionNone, EncryptionLUKS2}

// EncryptionTypes returns the values of ParamEncryption; the first is the default.
func EncryptionTypes() []string { return slices.Clone(encryptionTypes) }
