// SPDX-License-Identifier: Apache-2.0
pragma solidity 0.8.37;

import {IERC20} from "@openzeppelin/contracts/token/ERC20/IERC20.sol";
import {SafeERC20} from "@openzeppelin/contracts/token/ERC20/utils/SafeERC20.sol";
import {MerkleProof} from "@openzeppelin/contracts/utils/cryptography/MerkleProof.sol";

/// @title Payouts of a gpool pool: each account claims up to its cumulative amount.
/// @notice A root is published, waits for `delay` seconds, and is activated by anybody. While it waits the guardian
/// can stop it. Tokens leave by claims only; anybody may send a claim, the account of the leaf is paid.
/// @dev Publisher and guardian are fixed: keys rotate inside the wallet contracts behind these addresses. The token
/// must not charge on transfers and must not call its recipients before its balances are written.
contract Distributor {
    using SafeERC20 for IERC20;

    struct Pending {
        bytes32 root;
        bytes32 receiptsRoot;
        uint64 period;
        uint64 activeAt;
    }

    IERC20 public immutable token;
    address public immutable publisher;
    address public immutable guardian;
    uint64 public immutable delay;

    /// @notice Root of the active tree; zero before the first activation.
    bytes32 public root;
    /// @notice Period of the active tree; periods only grow.
    uint64 public period;
    /// @notice Root that waits; its `activeAt` is zero if there is none.
    Pending public pending;
    /// @notice Total that an account has been paid, in base units of the token.
    mapping(address account => uint256 amount) public claimed;
    /// @notice Merkle root of the receipts of each activated period.
    mapping(uint64 period => bytes32 receiptsRoot) public receiptsRoots;

    event Published(uint64 indexed period, bytes32 root, bytes32 receiptsRoot, uint64 activeAt);
    event Stopped(uint64 indexed period, bytes32 root, address by);
    event Activated(uint64 indexed period, bytes32 root, bytes32 receiptsRoot);
    event Claimed(address indexed account, uint256 cumulative);

    error BadDeployment();
    error NotAllowed(address caller);
    error EmptyRoot();
    error PeriodNotNewer(uint64 period, uint64 active);
    error AlreadyPending(uint64 period);
    error NothingPending();
    error TooEarly(uint64 activeAt);
    error InvalidProof();

    constructor(IERC20 token_, address publisher_, address guardian_, uint64 delay_) {
        if (address(token_).code.length == 0 || publisher_ == address(0) || guardian_ == address(0)) {
            revert BadDeployment();
        }
        if (publisher_ == guardian_ || delay_ == 0) revert BadDeployment();
        token = token_;
        publisher = publisher_;
        guardian = guardian_;
        delay = delay_;
    }

    /// @notice Publish the tree of a period. A waiting root is never replaced: it is stopped first.
    function publish(uint64 period_, bytes32 root_, bytes32 receiptsRoot) external {
        if (msg.sender != publisher) revert NotAllowed(msg.sender);
        if (root_ == 0) revert EmptyRoot();
        if (period_ <= period) revert PeriodNotNewer(period_, period);
        if (pending.activeAt != 0) revert AlreadyPending(pending.period);
        uint64 activeAt = uint64(block.timestamp) + delay;
        pending = Pending(root_, receiptsRoot, period_, activeAt);
        emit Published(period_, root_, receiptsRoot, activeAt);
    }

    /// @notice Discard the waiting root, also after its delay as long as nobody has activated it.
    function stop() external {
        if (msg.sender != guardian && msg.sender != publisher) revert NotAllowed(msg.sender);
        Pending memory stopped = pending;
        if (stopped.activeAt == 0) revert NothingPending();
        delete pending;
        emit Stopped(stopped.period, stopped.root, msg.sender);
    }

    /// @notice Make the waiting root the active one. Anybody may call after the delay.
    function activate() external {
        Pending memory next = pending;
        if (next.activeAt == 0) revert NothingPending();
        if (block.timestamp < next.activeAt) revert TooEarly(next.activeAt);
        delete pending;
        root = next.root;
        period = next.period;
        receiptsRoots[next.period] = next.receiptsRoot;
        emit Activated(next.period, next.root, next.receiptsRoot);
    }

    /// @notice Pay an account what its cumulative amount exceeds its earlier claims; 0 if nothing is due.
    function claim(address account, uint256 cumulative, bytes32[] calldata proof) external returns (uint256 paid) {
        bytes32 leaf = keccak256(bytes.concat(keccak256(abi.encode(block.chainid, address(this), account, cumulative))));
        if (!MerkleProof.verifyCalldata(proof, root, leaf)) revert InvalidProof();
        uint256 before = claimed[account];
        if (cumulative <= before) return 0;
        claimed[account] = cumulative;
        unchecked {
            paid = cumulative - before;
        }
        emit Claimed(account, cumulative);
        token.safeTransfer(account, paid);
    }
}
