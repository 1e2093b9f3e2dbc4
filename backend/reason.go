package backend

import "slices"

// Reason identifies the problem of a Condition for programs. A volume has at most one condition with the
// same reason. docs/reference/metrics.md has a row for each reason.
type Reason string

// Reasons of pools, which concern all volumes of the pool.
const (
	ReasonPoolUnavailable Reason = "PoolUnavailable"
	ReasonPoolAlmostFull  Reason = "PoolAlmostFull"
	ReasonTrashStuck      Reason = "TrashStuck"
	ReasonPoolFull        Reason = "PoolFull"
	ReasonPoolNeedsRepair Reason = "PoolNeedsRepair"
	ReasonServerSilent    Reason = "ServerSilent"
	ReasonDiskInTwoPools  Reason = "DiskInTwoPools"
	ReasonDiskOrphaned    Reason = "DiskOrphaned"
	ReasonDiskNotWiped    Reason = "DiskNotWiped"

	ReasonPoolMetadataAlmostFull Reason = "PoolMetadataAlmostFull"
)

// Reasons of a volume's record or data.
const (
	ReasonRecordDamaged         Reason = "RecordDamaged"
	ReasonDiskMissing           Reason = "DiskMissing"
	ReasonDiskTwice             Reason = "DiskTwice"
	ReasonDiskUnreadable        Reason = "DiskUnreadable"
	ReasonPartitionTableDamaged Reason = "PartitionTableDamaged"
	ReasonDirectoryMissing      Reason = "DirectoryMissing"
	ReasonDirectoryUnreachable  Reason = "DirectoryUnreachable"
	ReasonQuotaNotInForce       Reason = "QuotaNotInForce"
	ReasonQuotaChanged          Reason = "QuotaChanged"
	ReasonQuotaLost             Reason = "QuotaLost"
	ReasonQuotaUnreadable       Reason = "QuotaUnreadable"
	ReasonImageMissing          Reason = "ImageMissing"
	ReasonImageTruncated        Reason = "ImageTruncated"
	ReasonImageUnreadable       Reason = "ImageUnreadable"
	ReasonLockLost              Reason = "LockLost"
	ReasonFilesystemDamaged     Reason = "FilesystemDamaged"
	ReasonUnresponsive          Reason = "Unresponsive"
)

// Reasons of a volume that is staged or published on a node.
const (
	ReasonDeviceDetached     Reason = "DeviceDetached"
	ReasonNotMounted         Reason = "NotMounted"
	ReasonFilesystemErrors   Reason = "FilesystemErrors"
	ReasonFilesystemReadOnly Reason = "FilesystemReadOnly"
	ReasonFilesystemShutDown Reason = "FilesystemShutDown"
)

// reasons are all constants.
var reasons = []Reason{
	ReasonPoolUnavailable, ReasonPoolAlmostFull, ReasonTrashStuck, ReasonPoolFull,
	ReasonPoolNeedsRepair, ReasonServerSilent, ReasonDiskInTwoPools, ReasonDiskOrphaned,
	ReasonDiskNotWiped, ReasonPoolMetadataAlmostFull, ReasonRecordDamaged, ReasonDiskMissing,
	ReasonDiskTwice, ReasonDiskUnreadable, ReasonPartitionTableDamaged, ReasonDirectoryMissing,
	ReasonDirectoryUnreachable, ReasonQuotaNotInForce, ReasonQuotaChanged, ReasonQuotaLost,
	ReasonQuotaUnreadable, ReasonImageMissing, ReasonImageTruncated, ReasonImageUnreadable,
	ReasonLockLost, ReasonFilesystemDamaged, ReasonUnresponsive, ReasonDeviceDetached,
	ReasonNotMounted, ReasonFilesystemErrors, ReasonFilesystemReadOnly, ReasonFilesystemShutDown,
}

// Known reports whether a reason is one of the constants.
func (r Reason) Known() bool { return slices.Contains(reasons, r) }
