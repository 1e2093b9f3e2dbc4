package backend

// Reason identifies a problem of a volume or a pool, for programs. There is at most one
// condition of a reason for each volume. docs/metrics.md has a row for each reason.
type Reason string

// Reasons that concern pools, and so all of their volumes.
const (
	ReasonPoolUnavailable Reason = "PoolUnavailable"
	ReasonPoolAlmostFull  Reason = "PoolAlmostFull"
	ReasonTrashStuck      Reason = "TrashStuck"
	ReasonServerSilent    Reason = "ServerSilent"
	ReasonDiskInTwoPools  Reason = "DiskInTwoPools"
	ReasonDiskOrphaned    Reason = "DiskOrphaned"
	ReasonDiskNotWiped    Reason = "DiskNotWiped"
)

// Reasons that concern what a volume consists of.
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
)

// Reasons that concern a volume in use on a node.
const (
	ReasonDeviceDetached     Reason = "DeviceDetached"
	ReasonNotMounted         Reason = "NotMounted"
	ReasonFilesystemErrors   Reason = "FilesystemErrors"
	ReasonFilesystemReadOnly Reason = "FilesystemReadOnly"
	ReasonFilesystemShutDown Reason = "FilesystemShutDown"
)
