# Runs in its own mount namespace, in the network and UTS namespaces of an NFS
# server. Starts a KDC, and the daemons with which the server accepts Kerberos.
# Argument: the directory of the realm, with its configuration.
cd "$1"
export KRB5_CONFIG=$1/krb5.conf KRB5_KDC_PROFILE=$1/kdc.conf KRB5_KTNAME=$1/server.keytab
export TMPDIR=$1 # of the replay cache
hostname nas.trivet.test
kdb5_util create -s -P master >&2
kadmin.local >&2 <<END
addprinc -randkey nfs/nas.trivet.test
ktadd -k server.keytab nfs/nas.trivet.test
END
krb5kdc -P "$1/kdc.pid"
rpc.svcgssd -f -vvv >svcgssd.log 2>&1 &
until readlink /proc/$!/fd/* | grep auth.rpcsec.init >&2; do
	kill -0 $!
	sleep 0.1
done
# The names of owners, which NFS 4 transmits with Kerberos instead of numbers.
rpc.idmapd -S -f -v >idmapd.log 2>&1 &
until readlink /proc/$!/fd/* | grep nfs4.nametoid >&2; do
	kill -0 $!
	sleep 0.1
done
echo ready
exec sleep infinity >&2
